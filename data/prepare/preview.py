"""The first rows as the model receives them, with their tokens, and what of the data is cut, left out or not read.

From token shards where there are any; else from the files themselves, with the tokenizer that is known, or with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from config import Config
from data.batches.loader import StepLoader
from data.batches.objectives import lengths_of
from data.prepare.encode import Encoder, longest_of
from data.prepare.preparing import Prepared
from data.prepare.task import Rows, Task, decide, examples_of, passed_over, tokenizer_folder
from data.shards.store import STREAM, TRAIN, Manifest
from data.sources.peek import peek
from data.tokenizers.pieces import BROKEN
from data.tokenizers.tokenizer import Tokenizer
from language import say
from settings.fields import counted
from storage import Once, make_once
from terminal import letters, shortened

SHOWN_COLUMNS = 120  # of a text
TOLD_SHARE = 0.01  # of the tokens, from which on it is told that they are never read
SAMPLED_ROWS = 256  # of which the share that is cut is told, where no shards tell it


def table_of_shards(config: Config, prepared: Prepared, loader: StepLoader, tokenizer: Tokenizer, count: int) -> Rows:
    """The first `count` rows of shards, what of the data was cut, left out or is never read, and files that are not read."""
    manifest = Manifest.of(prepared.train_dir)
    table = _columns_row(manifest.content["settings"].get("columns", []))
    for number in range(min(count, loader.num_rows)):
        batch = loader.batch_of(np.array([number]))
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
    if task.shards is not None:
        return task, []
    found = peek(task.sources, task.columns, max(count, SAMPLED_ROWS), config.data.max_samples)
    folder = worded or tokenizer_folder(config, task, once)
    examples, table = examples_of(config, task.kind, task.columns, folder), _columns_row(task.columns.sides())
    if worded is not None:
        left = examples.usable(found.rows).texts
        table += [_side(place, text) for texts in left[:count] for place, text in enumerate(texts)]
    else:
        tokenizer = Tokenizer.load(folder)
        encoded = Encoder(tokenizer, examples, longest_of(task.kind, lengths_of(config.data, task.kind)))(found.rows)
        sides = [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in encoded.columns]
        for row in list(zip(*sides, strict=True))[: min(count, encoded.num_rows)]:
            for place, ids in enumerate(row):
                table.append(_side(place, tokenizer.decode_answer(ids), len(ids)))
        cut = [before > after for before, (_, after) in zip(encoded.uncut, encoded.columns, strict=True)]
        table += _cut_row(config, task.kind, int(np.any(cut, axis=0).sum()), encoded.num_rows, of_first=True)
    if found.bad_rows.count:
        words = "{count} of the first rows, such as {example}"
        if not config.data.skip_bad_rows:
            words = "{count} of the first rows, such as {example}; training stops there without --skip_bad_rows=True"
        bad = say(words, count=counted(found.bad_rows.count, "row"), example=found.bad_rows.examples[0])
        table.append((say("cannot be read"), bad))
    return task, [*table, *passed_over(config, task.kind)]


def _columns_row(columns: Sequence[str]) -> Rows:
    """The columns that the texts are made of, where they are not called so."""
    if not columns or columns[0] in ("prompt", "text", "messages", "conversations"):
        return []
    names = {2: "prompt response", 3: "prompt chosen rejected"}.get(len(columns), "text messages").split()
    flags = ", ".join(f"--{name}_column" for name in names)
    return [(say("columns"), f"{' -> '.join([columns[0], ', '.join(columns[1:])][: len(columns)])} ({flags})")]


def _side(place: int, text: str, tokens: int | None = None) -> tuple[str, str]:
    """What encoder (place 0) or decoder gets of a row."""
    side, cell = say("decoder") if place else say("encoder"), shown(text)
    return side, cell if tokens is None else say("{text} ({tokens})", text=cell, tokens=counted(tokens, "token"))


def lost_of_shards(config: Config, prepared: Prepared) -> Rows:
    """What of the training data was cut, left out or is never read, for a table."""
    manifest, counts = Manifest.of(prepared.train_dir), prepared.counts
    table = _cut_row(config, manifest.kind, counts[f"{TRAIN}_cut_rows"], counts[f"{TRAIN}_texts"])
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
    if kind == STREAM or not rows:
        return []
    limits = lengths_of(config.data, kind)
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
