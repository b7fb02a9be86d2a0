"""The first rows as the model receives them, with their tokens, and what of the data is cut, left out or not read.

From token shards where there are any; else from the files themselves, with the tokenizer that is known, or with none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data.batches.loader import StepLoader
from data.prepare.encode import unknown_warning
from data.prepare.preparing import Prepared
from data.prepare.training_data import TrainingData
from data.prepare.unread import passed_over
from data.shards.store import TRAIN, Manifest
from data.sources.peek import peek
from data.task import Table, TaskProtocol
from data.tokenizers.pieces import BROKEN
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import CleaningConfig, DataConfig
from settings.fields import counted
from support.language import say
from support.terminal import letters, shortened

SHOWN_COLUMNS = 120  # A text is shown in so many columns of the screen.
UNREAD_SHARE = 0.01  # A smaller share of the tokens that are never read is not mentioned.
SAMPLED_ROWS = 256  # Where no shards say it, so many rows say which share is cut.


def table_of_shards(
    data: DataConfig, prepared: Prepared, loader: StepLoader, tokenizer: Tokenizer, count: int
) -> Table:
    """The first `count` rows of shards, and what of the data was cut, left out or is never read."""
    manifest = Manifest.of(prepared.train_dir)
    table = _columns_row(loader.task, manifest.content["settings"].get("columns", []))
    for number in range(min(count, loader.num_rows)):
        table += loader.task.show_batch(loader.batch_of(np.array([number])), tokenizer, prepared.labels)
    return [*table, *lost_of_shards(data, prepared), *prepared.unread]


def table_of_files(
    data: DataConfig, training_data: TrainingData, cleaning: CleaningConfig, count: int, tokenizer_dir: Path | None
) -> Table:
    """The first rows of files of rows.

    Args:
        tokenizer_dir: None: the tokenizer is not known yet, and no tokens are shown.
    Raises:
        UserError: the data cannot be read.
    """
    task = training_data.task
    first = peek(training_data.sources, training_data.columns, max(count, SAMPLED_ROWS), data.max_samples)
    examples = task.examples(data, cleaning.clean, training_data.columns, tokenizer_dir or Path(data.cache_dir))
    tokenizer = None if tokenizer_dir is None else Tokenizer.load(tokenizer_dir)
    table = _columns_row(task, training_data.columns.sides())
    table += task.show_rows(data, first, count, examples, tokenizer)
    if first.bad_rows.count:
        words = "{count} of the first rows, such as {example}"
        if not data.skip_bad_rows:
            words = "{count} of the first rows, such as {example}; training stops there without --skip_bad_rows=True"
        cell = say(words, count=counted(first.bad_rows.count, "row"), example=first.bad_rows.examples[0])
        table.append((say("cannot be read"), cell))
    return [*table, *passed_over(data, task)]


def _columns_row(task: TaskProtocol, columns: Sequence[str]) -> Table:
    """The columns that texts and labels are made of, where they are not called so."""
    names = task.column_flags(columns) if columns else ()
    if not names:
        return []
    flags = ", ".join(f"--{name}" for name in names)
    sides = [columns[0], ", ".join(columns[1:])][: len(columns)]
    return [(say("columns"), f"{' -> '.join(sides)} ({flags})")]


def side_row(column: int, text: str, tokens: int | None = None) -> tuple[str, str]:
    """What encoder (column 0) or decoder gets of a row."""
    side = say("decoder") if column else say("encoder")
    cell = shown(text)
    return side, cell if tokens is None else say("{text} ({tokens})", text=cell, tokens=counted(tokens, "token"))


def text_of_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Ids as text, with sentinels and other tokens that stand in it, without end of text."""
    return tokenizer.decode(ids, skip_special=False).removesuffix(tokenizer.names["eos_token"])


def lost_of_shards(data: DataConfig, prepared: Prepared) -> Table:
    """What of the training data was cut, left out or is never read, for a table."""
    task = prepared.task
    cut = prepared.counts[f"{TRAIN}_cut_rows"]
    tokens = prepared.counts[f"{TRAIN}_tokens"]
    table = cut_row(task.limit_flags(data, cut), cut, prepared.counts[f"{TRAIN}_texts"])
    warning = unknown_warning(prepared.counts[f"{TRAIN}_unknown_tokens"], tokens)
    if warning:
        table.append((say("unknown"), warning))
    for reason, entry in Manifest.of(prepared.train_dir).content.get("dropped", {}).items():
        samples = ", ".join(repr("".join(letters(sample)[:60])) for sample in entry["samples"])
        example = say("{count}, such as {samples}", count=f"{entry['count']:,}", samples=samples)
        table.append((say("left out: {reason}", reason=reason), example))
    window = task.lengths(data).raw_tokens
    unread = tokens % max(1, min(window, tokens))
    if task.is_windowed and unread > UNREAD_SHARE * tokens:
        words = say(
            "the last {left} of {tokens} tokens, because each row takes {window}; a smaller --max_seq_len drops fewer",
            left=f"{unread:,}",
            tokens=f"{tokens:,}",
            window=f"{window:,}",
        )
        table.append((say("never read"), words))
    return table


def cut_row(limits: str, cut: int, rows: int, of_first: bool = False) -> Table:
    """How many rows are cut, for a table.

    Args:
        limits: the flags to which they are, in words; empty: nothing is told.
    """
    if not rows or not limits:
        return []
    words = "{cut} of {rows} ({share}) are longer than {longest} and are truncated"
    if of_first:
        words = "{cut} of the first {rows} ({share}) are longer than {longest} and are truncated"
    values = {"cut": f"{cut:,}", "rows": counted(rows, "row"), "share": f"{cut / rows:.1%}", "longest": limits}
    return [(say("cut"), say(words, **values))]


def shown(text: str) -> str:
    """A text in one line, its middle left out where it is long, without halves of letters; line ends as \\n."""
    # Where tokens are cut, or masked, in the middle of a letter's bytes, a decoder shows BROKEN for each half.
    return shortened(text.replace(BROKEN, "").replace("\r", "").replace("\n", "\\n"), SHOWN_COLUMNS)
