"""How do rows of text become rows of ids, and what is dropped and cut on the way?

Rows stream through: read, encode, hold out, write. A blank row is dropped, a pair that is too long is cut by tokens
with end of text as its last one; both are counted. Nothing else is lost: the token stream keeps every token of every
document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.lines import BadRows
from data.objectives import Lengths
from data.order import mix
from data.reading import Row, read_rows
from data.shards import PAIRS, ROW_TOKENS, TRAIN, VALIDATION, ShardWriter
from data.sources import Source
from data.tokenizer import Tokenizer
from settings import UserError

HELD_OUT_ONE_IN = 100
COUNTS = ("rows", "tokens", "texts", "bad_rows", "empty_rows", "cut_rows", "cut_tokens", "unknown_tokens")


@dataclass(frozen=True)
class Job:
    """What is to be encoded.

    Args:
        kind: stream or pairs; columns: the text columns.
        train: sources, all of them for training, or with `hold_out` one row in a hundred for validation; may be none.
        validation: sources of the validation split; may be none.
        lengths: pairs are cut to these.
        max_samples: rows of `train` that are read; None: all.
    """

    kind: str
    columns: Sequence[str]
    train: Sequence[Source]
    validation: Sequence[Source]
    hold_out: bool
    lengths: Lengths
    max_samples: int | None
    skip_bad_rows: bool
    shard_rows: int


@dataclass
class Split:
    """Rows of one split on their way to disk, with their counts."""

    writer: ShardWriter
    tokenizer: Tokenizer
    lengths: Lengths
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    held: list[NDArray[np.int32]] = field(default_factory=list)  # stream: tokens that do not fill a row yet

    def add_document(self, ids: NDArray[np.int32]) -> None:
        """Append a document and end of text to the stream, and write the rows that are full."""
        self.held += [ids, np.array([self.tokenizer.eos_id], np.int32)]
        self.counts["tokens"] += len(ids) + 1
        if sum(map(len, self.held)) >= ROW_TOKENS:
            tokens = np.concatenate(self.held)
            whole = len(tokens) // ROW_TOKENS * ROW_TOKENS
            for row in tokens[:whole].reshape(-1, ROW_TOKENS):
                self.writer.add(row)
            self.held = [tokens[whole:].copy()]

    def add_pair(self, prompt: NDArray[np.int32], response: NDArray[np.int32]) -> None:
        """Write a pair, each side cut to its length and ended by end of text."""
        sides = ((prompt, self.lengths.input_tokens), (response, self.lengths.target_tokens))
        cut = [max(0, len(ids) + 1 - longest) for ids, longest in sides]
        ended = [np.append(ids[: longest - 1], self.tokenizer.eos_id) for ids, longest in sides]
        self.counts["cut_rows"] += any(cut)
        self.counts["cut_tokens"] += sum(cut)
        self.counts["tokens"] += sum(map(len, ended))
        self.writer.add(*ended)

    def finish(self) -> dict[str, Any]:
        """Write the last, shorter row of a stream, and say what the split holds."""
        if sum(map(len, self.held)):
            self.writer.add(np.concatenate(self.held))
        self.writer.finish()
        self.counts["rows"] = self.writer.num_rows
        return {"counts": self.counts, "shards": self.writer.shards}


def write_splits(job: Job, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Encode all rows of a job into shards.

    Args:
        folder: gets a folder per split.
    Returns:
        split -> {"counts": ..., "shards": [{"file", "rows"}, ...]}, for the manifest.
    Raises:
        UserError: the data is broken, or too little to train on.
    Memory:
        one batch of rows and of encodings.
    """
    splits: dict[str, Split] = {}
    with ExitStack() as stack:
        for name in [TRAIN] * bool(job.train) + [VALIDATION] * (job.hold_out or bool(job.validation)):
            writer = ShardWriter(folder / name, job.kind, tokenizer.size, job.shard_rows)
            splits[name] = Split(stack.enter_context(writer), tokenizer, job.lengths)
        if job.train:
            _fill(job, job.train, job.max_samples, splits[TRAIN], splits[VALIDATION] if job.hold_out else None)
        if job.validation:
            _fill(job, job.validation, None, splits[VALIDATION], None)
        facts = {name: split.finish() for name, split in splits.items()}
    _check_enough(job, facts)
    return facts


def _fill(job: Job, sources: Sequence[Source], max_rows: int | None, split: Split, held_out: Split | None) -> None:
    bad_rows = BadRows(job.skip_bad_rows)
    number = 0
    for batch in limited(read_rows(sources, job.columns, bad_rows), max_rows):
        rows = [row for row in batch if all(text.strip() for text in row)]
        split.counts["empty_rows"] += len(batch) - len(rows)
        encoded = split.tokenizer.encode_batch([text for row in rows for text in row])
        width = len(job.columns)
        for first in range(0, len(encoded), width):
            target = held_out if held_out is not None and is_held_out(number) else split
            number += 1
            target.counts["texts"] += 1
            sides = encoded[first : first + width]
            target.counts["unknown_tokens"] += sum(int((ids == split.tokenizer.unk_id).sum()) for ids in sides)
            if job.kind == PAIRS:
                target.add_pair(*sides)
            else:
                target.add_document(sides[0])
    split.counts["bad_rows"] += bad_rows.count


def limited(batches: Iterable[list[Row]], max_rows: int | None) -> Iterator[list[Row]]:
    """Give batches until `max_rows` rows have come."""
    left = max_rows
    for batch in batches:
        if left is not None:
            batch = batch[:left]
            left -= len(batch)
        yield batch
        if left == 0:
            return


def is_held_out(number: int) -> bool:
    """Say whether a row, by its number alone, is kept for validation: one of each hundred, always the second of all."""
    block, place = divmod(number, HELD_OUT_ONE_IN)
    return place == (int(mix(np.array([block], np.uint64))[0]) % HELD_OUT_ONE_IN if block else 1)


def _check_enough(job: Job, facts: dict[str, Any]) -> None:
    problems = []
    for name, sources in ((TRAIN, job.train), (VALIDATION, job.validation or job.train)):
        if name in facts and not facts[name]["counts"]["texts"]:
            counts = facts.get(TRAIN, facts[name])["counts"]
            seen = f"{counts['texts']} rows with text, {counts['empty_rows']} blank, {counts['bad_rows']} broken"
            problems.append(
                f"{_named(sources)}: leaves no row for {name} ({seen}); {_remedy(name, bool(job.validation))}"
            )
    if problems:
        raise UserError(*problems)


def _named(sources: Sequence[Source]) -> str:
    return str(sources[0].path) if len(sources) == 1 else f"{sources[0].path} and {len(sources) - 1} more"


def _remedy(split: str, separate_file: bool) -> str:
    if split == TRAIN or separate_file:
        return "name a file with text"
    return "one is held out of at least two; name more text, or a --validation_file"
