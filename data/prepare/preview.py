"""The first rows as the model receives them, with their tokens, and what of the data is cut, left out or not read.

From token shards where there are any; else from the files themselves, with the tokenizer that is known, or with none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL, LabelledBatch
from data.batches.loader import StepLoader
from data.batches.objectives import lengths_of
from data.prepare.encode import Encoder, TextEncoder, longest_of, unknown_warning
from data.prepare.preparing import Prepared
from data.prepare.task import Rows, Task, check_heeded, decide, examples_of, passed_over, tokenizer_folder
from data.shards.store import STREAM, TRAIN, Manifest
from data.sources.peek import peek
from data.tokenizers.pieces import BROKEN
from data.tokenizers.tokenizer import Tokenizer
from language import say
from settings.consistency import HEADS, SEQUENCE
from settings.declared import Config
from settings.fields import counted
from storage import Once, make_once
from terminal import letters, shortened, width

SHOWN_COLUMNS = 120  # of a text
MASKED = "-"  # in place of a label that is not trained
TOLD_SHARE = 0.01  # of the tokens, from which on it is told that they are never read
SAMPLED_ROWS = 256  # of which the share that is cut is told, where no shards tell it


def table_of_shards(config: Config, prepared: Prepared, loader: StepLoader, tokenizer: Tokenizer, count: int) -> Rows:
    """The first `count` rows of shards, what of the data was cut, left out or is never read, and files that are not read."""
    manifest = Manifest.of(prepared.train_dir)
    columns = manifest.content["settings"].get("columns", [])
    table = _columns_row(manifest.kind, columns)
    for number in range(min(count, loader.num_rows)):
        batch = loader.batch_of(np.array([number]))
        if isinstance(batch, LabelledBatch):
            ids, labels = batch.input_ids[0, : batch.input_lengths[0]], batch.labels[0]
            table += _with_labels(tokenizer, ids, [_label_of(label, prepared.labels) for label in labels[: len(ids)]])
            continue
        sides = [batch.input_ids[0, : batch.input_lengths[0]]]
        sides += [batch.labels[place, :length] for place, length in enumerate(batch.target_lengths)]
        for place, ids in enumerate(sides):
            text = tokenizer.decode(ids, skip_special=False).removesuffix(tokenizer.names["eos_token"])
            table.append(_side(place, text, len(ids)))
    return [*table, *lost_of_shards(config, prepared), *prepared.unread]


def table_of_files(config: Config, count: int, once: Once = make_once, worded: Path | None = None) -> tuple[Task, Rows]:
    """The task, and the first rows of the files that the settings name; no rows where those are shards already.

    Args:
        once: `make_once`, or `only_if_made` where no tokenizer shall be trained.
        worded: a folder whose template words the prompts, where the tokenizer is not known yet: no tokens are told.
    Raises:
        UserError: the data cannot be read. NotMade: by `only_if_made`.
    """
    task = decide(config, once)
    check_heeded(config.data, task)
    if task.shards is not None:
        return task, []
    found = peek(task.sources, task.columns, max(count, SAMPLED_ROWS), config.data.max_samples)
    folder = worded or tokenizer_folder(config, task, once)
    table = _columns_row(task.kind, task.columns.sides())
    if task.kind in HEADS:
        encoder = None if worded else TextEncoder(Tokenizer.load(folder), config.data.prepare_text)
        for text, told in found.rows[:count]:
            table += _labelled_row(encoder, text, json.loads(told), task.kind)
    elif worded is not None:
        left = examples_of(config, task.kind, task.columns, folder).usable(found.rows).texts
        table += [_side(place, text) for texts in left[:count] for place, text in enumerate(texts)]
    else:
        table += _encoded_rows(config, task, folder, found.rows, count)
    if found.bad_rows.count:
        words = "{count} of the first rows, such as {example}"
        if not config.data.skip_bad_rows:
            words = "{count} of the first rows, such as {example}; training stops there without --skip_bad_rows=True"
        bad = say(words, count=counted(found.bad_rows.count, "row"), example=found.bad_rows.examples[0])
        table.append((say("cannot be read"), bad))
    return task, [*table, *passed_over(config, task.kind)]


def _encoded_rows(config: Config, task: Task, folder: Path, read: Sequence[tuple[str, ...]], count: int) -> Rows:
    """The first rows with their tokens, and how many of all that were read are cut."""
    tokenizer, examples = Tokenizer.load(folder), examples_of(config, task.kind, task.columns, folder)
    encoded = Encoder(tokenizer, examples, longest_of(task.kind, lengths_of(config.data, task.kind)))(read)
    sides = [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in encoded.columns]
    rows = list(zip(*sides, strict=True))[: encoded.num_rows]
    table = [
        _side(place, tokenizer.decode_answer(ids), len(ids)) for row in rows[:count] for place, ids in enumerate(row)
    ]
    cut = [before > after for before, (_, after) in zip(encoded.uncut, encoded.columns, strict=True)]
    return table + _cut_row(config, task.kind, int(np.any(cut, axis=0).sum()), encoded.num_rows, of_first=True)


def _labelled_row(encoder: TextEncoder | None, text: str, labels: list[str | None], kind: str) -> Rows:
    """A text with its label, or its tokens over their labels; without an encoder the text as it is."""
    if encoder is None:
        return [
            _side(0, text),
            (say("label") if kind == SEQUENCE else say("labels"), shown(" ".join(label or MASKED for label in labels))),
        ]
    if kind == SEQUENCE:
        ids = encoder.encode([text])[0]
        return _with_labels(encoder.tokenizer, np.append(ids, encoder.tokenizer.eos_id), labels)
    ids, places = encoder.with_places(text, len(labels))
    of_tokens: list[str | None] = [None] * (len(ids) + 1)
    for place, label in zip(places.tolist(), labels, strict=True):
        if place >= 0:
            of_tokens[place] = label
    return _with_labels(encoder.tokenizer, np.append(ids, encoder.tokenizer.eos_id), of_tokens)


def _with_labels(tokenizer: Tokenizer, ids: NDArray[Any], labels: Sequence[str | None]) -> Rows:
    """The label of a text, or the labels of the first tokens under these, column by column."""
    if len(labels) == 1 < len(ids):
        text = tokenizer.decode(ids, skip_special=False).removesuffix(tokenizer.names["eos_token"])
        return [_side(0, text, len(ids)), (say("label"), labels[0] or MASKED)]
    tokens = [(tokenizer.id_to_token(int(number)) or "").lstrip("▁Ġ") or "▁" for number in ids[: SHOWN_COLUMNS // 2]]
    pairs = [(token, label or MASKED) for token, label in zip(tokens, labels, strict=False)]
    widths = [max(width(token), width(label)) for token, label in pairs]
    while sum(widths) + len(widths) > SHOWN_COLUMNS:
        widths.pop()
    rows = [
        " ".join(cell + " " * (most - width(cell)) for cell, most in zip(cells, widths, strict=False)).rstrip()
        for cells in zip(*pairs, strict=True)
    ]
    count = counted(len(ids), "token")
    return [
        (say("tokens"), rows[0] + ("" if len(widths) == len(ids) else say(" ... ({count})", count=count))),
        (say("labels"), rows[1]),
    ]


def _label_of(label: Any, names: Sequence[str]) -> str | None:
    """A stored label for people; None where none is learnt."""
    if label.dtype.kind == "f":
        return None if np.isnan(label) else f"{label:.9g}"
    return None if label == IGNORED_LABEL else names[label]


def _columns_row(kind: str, columns: Sequence[str]) -> Rows:
    """The columns that texts and labels are made of, where they are not called so."""
    names = {2: "prompt response", 3: "prompt chosen rejected"}.get(len(columns), "text messages")
    usual = columns[:1] in (["prompt"], ["text"], ["messages"], ["conversations"])
    if kind in HEADS:
        names, usual = " ".join(("text", "label", "mask")[: len(columns)]), columns[:2] == ["text", "label"]
    if usual or not columns:
        return []
    flags = ", ".join(f"--{name}_column" for name in names.split())
    return [(say("columns"), f"{' -> '.join([columns[0], ', '.join(columns[1:])][: len(columns)])} ({flags})")]


def _side(place: int, text: str, tokens: int | None = None) -> tuple[str, str]:
    """What encoder (place 0) or decoder gets of a row."""
    side, cell = say("decoder") if place else say("encoder"), shown(text)
    return side, cell if tokens is None else say("{text} ({tokens})", text=cell, tokens=counted(tokens, "token"))


def lost_of_shards(config: Config, prepared: Prepared) -> Rows:
    """What of the training data was cut, left out or is never read, for a table."""
    manifest, counts = Manifest.of(prepared.train_dir), prepared.counts
    table = _cut_row(config, manifest.kind, counts[f"{TRAIN}_cut_rows"], counts[f"{TRAIN}_texts"])
    if warning := unknown_warning(counts[f"{TRAIN}_unknown_tokens"], counts[f"{TRAIN}_tokens"]):
        table.append((say("unknown"), warning))
    for reason, entry in manifest.content.get("dropped", {}).items():
        samples = ", ".join(repr("".join(letters(sample)[:60])) for sample in entry["samples"])
        example = say("{count}, such as {samples}", count=f"{entry['count']:,}", samples=samples)
        table.append((say("left out: {reason}", reason=reason), example))
    if manifest.kind == STREAM and (tokens := counts[f"{TRAIN}_tokens"]):
        window = lengths_of(config.data, prepared.objective).raw_tokens
        left = tokens % min(window, tokens)
        if left > TOLD_SHARE * tokens:
            values = {"left": f"{left:,}", "tokens": f"{tokens:,}", "window": f"{window:,}"}
            told_end = "the last {left} of {tokens} tokens, because each row takes {window}; a smaller --max_seq_len drops fewer"
            table.append((say("never read"), say(told_end, **values)))
    return table


def _cut_row(config: Config, kind: str, cut: int, rows: int, of_first: bool = False) -> Rows:
    if kind == STREAM or not rows or (kind in HEADS and not cut):
        return []
    limits = lengths_of(config.data, kind)
    longest = f"--max_seq_len={limits.input_tokens}"
    if kind not in HEADS:
        longest = say(
            "--max_seq_len={input} or --max_target_len={target}", input=limits.input_tokens, target=limits.target_tokens
        )
    values = {"cut": f"{cut:,}", "rows": counted(rows, "row"), "share": f"{cut / rows:.1%}", "longest": longest}
    if of_first:
        text = say("{cut} of the first {rows} ({share}) are longer than {longest} and are truncated", **values)
    else:
        text = say("{cut} of {rows} ({share}) are longer than {longest} and are truncated", **values)
    return [(say("cut"), text)]


def shown(text: str) -> str:
    """A text in one line, its middle left out where it is long, without halves of letters; line ends as \\n."""
    # where tokens are cut, or masked, in the middle of a letter's bytes, a decoder shows BROKEN for each half
    return shortened(text.replace(BROKEN, "").replace("\r", "").replace("\n", "\\n"), SHOWN_COLUMNS)
