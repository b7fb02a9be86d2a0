"""Rows whose texts repeat those of an earlier row, by a 64-bit BLAKE2b digest (10 million rows: one false hit in 300,000 corpora).

A first pass writes the digests of all rows to a file, 8 bytes a row. They are then compared in buckets, so that a few million
are in memory at a time whatever the size of the corpus.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.prepare.passes import Position, read_batches, save_state, saved_state, workers_in_order
from data.progress import ProgressLine
from data.sources.columns import Columns
from data.sources.lines import BadRows
from data.sources.source import Source
from data.text.conversations import Examples, TextRow
from language import say
from storage import atomic_file

BUCKET_ROWS = 2**21
SAVE_BATCHES = 256  # between two saved states: a shard is as much
DIGESTS, RESULT, STATE = "digests.bin", "duplicates.npy", "digests.json"

Digests = NDArray[np.uint64]


def digests_of(examples: Examples, rows: Sequence[TextRow]) -> tuple[int, Digests]:
    """Bytes of a batch's texts, and one digest for each of its usable rows."""
    size = sum(len(text.encode("utf8", "replace")) for row in rows for text in row)
    texts = ("\0".join(row).encode("utf8", "replace") for row in examples.usable(rows).texts)
    return size, np.frombuffer(b"".join(blake2b(text, digest_size=8).digest() for text in texts), np.uint64)


def find_duplicates(
    sources: Sequence[Source],
    columns: Columns | Sequence[str],
    examples: Examples,
    folder: Path,
    workers: int,
    *,
    max_rows: int | None = None,
    skip_bad_rows: bool = False,
) -> NDArray[np.bool_]:
    """Say which rows repeat an earlier one, by their number among the usable rows.

    Args:
        folder: for the files of the work, which are removed at the end; what an earlier attempt left there is used.
        workers: processes that compute digests.
    Returns:
        (usable rows,) bool, True for a row to leave out. The first of equal rows always stays.
    Memory:
        1 byte a row, and about 100 MB for the bucket in hand; on disk 8 bytes a row.
    """
    result = folder / RESULT
    digests = folder / DIGESTS
    if not result.is_file():
        batches = partial(read_batches, sources, columns, BadRows(skip_bad_rows), max_rows)
        _write_digests(batches, examples, folder, workers)
        with atomic_file(result) as temporary, temporary.open("wb") as file:
            np.save(file, repeats(digests))
    digests.unlink(missing_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    return np.asarray(np.load(result))


def _write_digests(read: Callable[[Position], Any], examples: Examples, folder: Path, workers: int) -> None:
    """Append the digests of all rows to a file, from where an earlier attempt stopped."""
    try:
        state = saved_state(folder / STATE)
    except ValueError:  # The state is damaged: all rows are read again.
        state = None
    position = Position(**state["position"]) if state else Position()
    path = folder / DIGESTS
    path.touch()
    os.truncate(path, state["size"] if state else 0)
    with ExitStack() as stack:
        file = stack.enter_context(path.open("ab"))
        progress = stack.enter_context(ProgressLine(say("looking for duplicates"), position.rows))
        run = stack.enter_context(workers_in_order(partial, (digests_of, examples), workers))
        for number, (batch, (size, digests)) in enumerate(run(read(position)), 1):
            digests.tofile(file)
            progress.add(len(batch.rows), size)
            if number % SAVE_BATCHES == 0:
                file.flush()
                os.fsync(file.fileno())
                save_state(folder / STATE, {"position": asdict(batch.end), "size": file.tell()})


def repeats(path: Path) -> NDArray[np.bool_]:
    """Say which digests of a file stand further ahead in it too."""
    count = path.stat().st_size // np.dtype(np.uint64).itemsize
    digests = np.memmap(path, np.uint64, "r") if count else np.zeros(0, np.uint64)
    doubles = np.zeros(count, np.bool_)
    buckets = -(-count // BUCKET_ROWS)
    for bucket in range(buckets):
        known = np.zeros(0, np.uint64)
        for start in range(0, count, BUCKET_ROWS):
            part = digests[start : start + BUCKET_ROWS]
            rows = np.flatnonzero((part >> np.uint64(32)) % np.uint64(buckets) == bucket)
            distinct, first = np.unique(part[rows], return_index=True)
            is_new = ~np.isin(distinct, known, assume_unique=True)
            doubles[start + rows] = True
            doubles[start + rows[first[is_new]]] = False
            known = np.concatenate([known, distinct[is_new]])
    return doubles
