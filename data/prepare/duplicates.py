"""Rows whose texts repeat those of an earlier row, by a 64-bit BLAKE2b digest (10 million rows: one false hit in
300,000 corpora).

A first pass writes the digests of all rows to files, 8 bytes a row. They are then compared in buckets, so that a few
million are in memory at a time whatever the size of the corpus.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.prepare.passes import Position, read_batches, workers_in_order
from data.progress import ProgressLine, text_bytes
from data.sources.columns import Columns
from data.sources.lines import BadRows
from data.sources.source import Source
from data.text.conversations import Examples, TextRow
from support.language import say
from support.storage import Parts

BUCKET_ROWS = 2**21
PART_ROWS = 2**16  # Digests in a file: as many rows as a shard has.

Digests = NDArray[np.uint64]


def digests_of(examples: Examples, rows: Sequence[TextRow]) -> tuple[int, Digests]:
    """Bytes of a batch's texts, and one digest for each of its usable rows."""
    texts = ("\0".join(row).encode("utf8", "replace") for row in examples.usable(rows).texts)
    digests = b"".join(blake2b(text, digest_size=8).digest() for text in texts)
    return text_bytes(rows), np.frombuffer(digests, np.uint64)


def find_duplicates(
    sources: Sequence[Source],
    columns: Columns | Sequence[str],
    examples: Examples,
    parts: Parts,
    workers: int,
    *,
    max_rows: int | None = None,
    skip_bad_rows: bool = False,
) -> NDArray[np.bool_]:
    """Say which rows repeat an earlier one, by their number among the usable rows.

    Args:
        parts: get the digests; those that an earlier attempt has finished are not computed again.
        workers: processes that compute digests.
    Returns:
        (usable rows,) bool, True for a row to leave out. The first of equal rows always stays.
    Memory:
        1 byte a row, and about 100 MB for the bucket in hand; on disk 8 bytes a row.
    """
    count = next(number for number in itertools.count() if number not in parts)
    position = Position(**parts.facts(count - 1)) if count else Position()
    batches = read_batches(sources, columns, BadRows(skip_bad_rows), max_rows, position)
    digests = list[Digests]()

    def write(end: Position) -> None:
        nonlocal count
        with parts.write(count, asdict(end)) as path:
            np.concatenate([np.zeros(0, np.uint64), *digests]).tofile(path)
        count += 1
        digests.clear()

    with (
        ProgressLine(say("looking for duplicates"), position.rows) as progress,
        workers_in_order(partial, (digests_of, examples), workers) as run,
    ):
        for batch, (size, of_batch) in run(batches):
            digests.append(of_batch)
            progress.add(len(batch.rows), size)
            if sum(map(len, digests)) >= PART_ROWS:
                write(batch.end)
    if position.source < len(sources):
        write(Position(len(sources)))
    return repeats([parts.path(number) for number in range(count)])


def repeats(paths: Sequence[Path]) -> NDArray[np.bool_]:
    """Say which digests of files, one behind the other, stand further ahead in them too."""
    starts = np.cumsum([0, *(path.stat().st_size // np.dtype(np.uint64).itemsize for path in paths)])
    doubles = np.ones(int(starts[-1]), np.bool_)
    buckets = -(-len(doubles) // BUCKET_ROWS)
    for bucket in range(buckets):
        distinct = [np.zeros(0, np.uint64)]
        numbers = [np.zeros(0, np.int64)]
        for start, path in zip(starts, paths, strict=False):
            digests = np.fromfile(path, np.uint64)  # A file that stays mapped stays open, and a corpus has thousands.
            rows = np.flatnonzero((digests >> np.uint64(32)) % np.uint64(buckets) == bucket)
            # Within a file first, because one text may be most of the rows.
            values, first = np.unique(digests[rows], return_index=True)
            distinct.append(values)
            numbers.append(start + rows[first])
        _, first = np.unique(np.concatenate(distinct), return_index=True)
        doubles[np.concatenate(numbers)[first]] = False
    return doubles
