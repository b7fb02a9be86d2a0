"""The first rows as the model receives them, with their tokens, and what of the data is cut, left out or not read.

From token shards where there are any; else from the files themselves, with the tokenizer that is known, or with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from config import Config
from data.batches.loader import StepLoader
from data.batches.objectives import lengths_of
from data.prepare.encode import Encoder, longest_of
from data.prepare.preparing import Prepared
from data.prepare.task import Task, columns_of, decide, examples_of, tokenizer_folder
from data.shards.store import STREAM, TRAIN, Manifest, is_shards
from data.sources.files import Listing, Source, detect, listing, parts_of
from data.sources.peek import peek
from data.sources.reading import head_of
from data.tokenizers.pieces import BROKEN
from data.tokenizers.tokenizer import Tokenizer
from formats import TSV
from language import join, say
from settings.errors import UserError
from settings.fields import counted, listed
from storage import Once, make_once

LETTERS = 240  # of a text that are shown
TOLD_SHARE = 0.01  # of the tokens, from which on it is told that they are never read
SAMPLED_ROWS = 256  # of which the share that is cut is told, where no shards tell it
Rows = list[tuple[str, str]]


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
            table.append(_side(place, text.rstrip(BROKEN), len(ids)))
    return [*table, *lost_of_shards(config, prepared), *passed_over(config, manifest.kind)]


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
        left, *_ = examples.usable(found.rows)
        table += [_side(place, text) for texts in left[:count] for place, text in enumerate(texts)]
    else:
        tokenizer = Tokenizer.load(folder)
        encoded = Encoder(tokenizer, examples, longest_of(task.kind, lengths_of(config.data, task.kind)))(found.rows)
        sides = [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in encoded.columns]
        for row in list(zip(*sides, strict=True))[: min(count, encoded.num_rows)]:
            for place, ids in enumerate(row):
                table.append(_side(place, tokenizer.decode_answer(ids).rstrip(BROKEN), len(ids)))
        cut = [before > after for before, (_, after) in zip(encoded.uncut, encoded.columns, strict=True)]
        table += _cut_row(config, task.kind, int(np.any(cut, axis=0).sum()), encoded.num_rows, of_first=True)
    if found.bad_rows.count:
        words = "{count} of the first ones, such as {example}"
        if not config.data.skip_bad_rows:
            words = "{count} of the first ones, such as {example}; training stops there without --skip_bad_rows=True"
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


def passed_over(config: Config, kind: str) -> Rows:
    """Files and columns of the data that are not read, and how files were taken, for a table; none where that cannot be told."""
    table: Rows = []
    for name in ("train_file", "validation_file"):
        spec = getattr(config.data, name)
        with suppress(UserError, OSError):
            if spec and not is_shards(spec):
                parts = [listing(part, f"--{name}") for part in parts_of(spec)]
                holds_out = name == "train_file" and config.data.validation_file is None
                table += _of_files(parts, holds_out)
                firsts = [detect(part.taken[0], f"--{name}") for part in parts if part.taken]
                table += _of_columns(config, kind, firsts)
    return list(dict.fromkeys(table))


def _of_files(parts: Sequence[Listing], holds_out: bool) -> Rows:
    """What became of the files of folders whose names say something.

    Args:
        holds_out: whether those for validation are read.
    """
    taken, told_files = {file for part in parts for file in part.taken}, dict[str, list[str]]()
    for title, group, words in (
        ("not read", "descriptions", "{files} .json beside other data files, where it mostly describes them, the first {file}; name it too if it holds rows"),
        ("not read", "test", "{files} for testing by name, the first {file}"),
        ("not read", "others", "{files} whose names say no split, the first {file}"),
        ("held out" if holds_out else "not read", "validation", "{files} for validation by name, the first {file}"),
        ("read too", "unheeded", "{files} that say validation or test by name, as none says train, the first {file}"),
    ):  # fmt: skip
        found = [file for part in parts for file in getattr(part, group) if (file in taken) == (title == "read too")]
        if found:
            files = len(found) if group == "descriptions" else counted(len(found), "file")
            told_files.setdefault(title, []).append(say(words, files=files, file=found[0]))
    return [(say(title), join("; ", said)) for title, said in told_files.items()]


def _of_columns(config: Config, kind: str, firsts: Sequence[Source]) -> Rows:
    """Columns that are not used, of the first file of each part; and of TSV whether its cells are quoted."""
    columns, unused = columns_of(config.data, kind, firsts), dict[str, None]()
    for source in firsts:
        names = head_of(source).all_names
        unused |= dict.fromkeys(name for name in names if name not in columns.kinds(names))
    named = [name or say("a column without a name") for name in unused]  # as pandas writes its index
    table = [(say("not used"), listed(named))] if named else []
    quoted = [source.path for source in firsts if source.kind == TSV and head_of(source).is_quoted]
    told_quotes = "{file}: cells in quotes are read as in CSV"
    return [*table, *((say("quotes"), say(told_quotes, file=file)) for file in quoted)]


def lost_of_shards(config: Config, prepared: Prepared) -> Rows:
    """What of the training data was cut, left out or is never read, for a table."""
    manifest, counts = Manifest.of(prepared.train_dir), prepared.counts
    table = _cut_row(config, manifest.kind, counts[f"{TRAIN}_cut_rows"], counts[f"{TRAIN}_texts"])
    for reason, entry in manifest.content.get("dropped", {}).items():
        samples = ", ".join(repr(sample[:60]) for sample in entry["samples"])
        example = say("{count}, such as {samples}", count=f"{entry['count']:,}", samples=samples)
        table.append((say("left out: {reason}", reason=reason), example))
    if manifest.kind == STREAM and (tokens := counts[f"{TRAIN}_tokens"]):
        window = lengths_of(config.data, prepared.objective).raw_tokens
        left = tokens % min(window, tokens)
        if left > TOLD_SHARE * tokens:
            values = {"left": f"{left:,}", "tokens": f"{tokens:,}", "window": f"{window:,}"}
            told_end = (
                "the last {left} of {tokens} tokens, as a row takes {window}; a smaller --max_seq_len leaves fewer"
            )
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
        text = say("{cut} of the first {rows} ({share}) are longer than {longest}, and cut there", **values)
    else:
        text = say("{cut} of {rows} ({share}) are longer than {longest}, and cut there", **values)
    return [(say("cut"), text)]


def shown(text: str) -> str:
    """A text in one line, its end kept where its middle is left out; line ends as \\n."""
    flat = text.replace("\r", "").replace("\n", "\\n")
    half = LETTERS // 2
    return flat if len(flat) <= LETTERS else f"{flat[:half]} ... {flat[-half:]}"
