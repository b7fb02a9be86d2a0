"""Rows that repeat an earlier row exactly or nearly; everything that grows is kept on disk.

- exact: rows whose texts are equal, by a 64-bit BLAKE2b digest (10 million rows: one false hit in 300,000 corpora).
- near: rows that share at least about 80% of their runs of five characters, whatever case and blanks, by MinHash
  signatures of 128 values (Broder 1997, from the library rensa) and locality-sensitive hashing in 16 bands of 8 (Leskovec
  et al., "Mining of Massive Datasets", section 3.4). Rows that agree in a band are compared by their whole signatures
  with the first of them that stays. What is compared is what the rows say, with the turns before and without a template,
  whose words all rows share. Where every answer of a conversation is learnt, each is compared with those of other
  conversations that have as many turns before them: within one, the later always repeat the earlier.

A first pass signs all rows into files: 8 bytes a row, or 384. Each file of digests is then sorted in buckets, so that a
few million rows are in memory at a time whatever the size of the corpus.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches.order import mix
from data.prepare.passes import Position, read_batches, save_state, saved_state, workers_in_order
from data.progress import ProgressLine
from data.sources.files import Source
from data.sources.layouts import Columns
from data.sources.lines import BadRows
from data.text.conversations import Examples, Row
from data.text.templates import Template
from language import say
from settings.errors import UserError
from storage import atomic_file

EXACT, NEAR = "exact", "near"
NUM_PERM, BANDS = 128, 16
SIMILAR = 0.8
SHINGLE_CHARS = 5
SEED = 1
BUCKET_ROWS = 2**21
PAIR_ROWS = 4096
SAVE_BATCHES = 256  # signed between two saved states: a shard is as much
RESULT, STATE = "duplicates.npy", "signing.json"
_PRIME = np.uint64(0x100000001B3)

Signed = tuple[int, list[NDArray[Any]]]  # text bytes, and per file one entry a row


def sign(how: str, examples: Examples, rows: Sequence[Row]) -> Signed:
    """Sign the usable rows of a batch: one digest a row, or 16 bands and a signature."""
    if how == NEAR and examples.template is not None:
        examples = replace(examples, template=Template())
    left = examples.usable(rows)
    texts = ["\0".join(row) for row in left.texts]
    size = sum(len(text.encode("utf8", "replace")) for row in rows for text in row)
    if how == EXACT:
        digests = b"".join(blake2b(text.encode("utf8", "replace"), digest_size=8).digest() for text in texts)
        return size, [np.frombuffer(digests, np.uint64)]
    signatures = minhash(texts)
    # rows are alike only if they have as many turns
    counts = [len(turns) or 1 for turns in left.turns]
    apart = mix(np.array(counts, np.uint64)) if examples.each_turn else np.uint64(0)
    return size, [*(band ^ apart for band in bands(signatures)), signatures]


def minhash(texts: Sequence[str]) -> NDArray[np.uint16]:
    """Sign texts by the runs of five characters in them, without case and blanks: (texts, 128), low 16 bits of each."""
    try:
        from rensa import RMinHash  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(
            "--dedup = near, needs the package rensa; install it with pip install rensa, or use --dedup=exact"
        ) from None
    if not texts:
        return np.zeros((0, NUM_PERM), np.uint16)
    hashes = [shingle_hashes("".join(text.lower().split())) for text in texts]
    offsets = np.cumsum([0, *map(len, hashes)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(hashes), offsets, NUM_PERM, SEED)
    return np.array(matrix.to_rows(), np.uint32).astype(np.uint16)


def shingle_hashes(text: str) -> NDArray[np.uint64]:
    """One 64-bit hash for each run of five characters; at least one."""
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32).astype(np.uint64)
    width = max(1, min(SHINGLE_CHARS, len(codes)))
    count = max(1, len(codes) - width + 1)
    hashes = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for place in range(width if len(codes) else 0):
            hashes = (hashes + codes[place : place + count] + np.uint64(1)) * _PRIME
    return mix(hashes)


def bands(signatures: NDArray[np.uint16]) -> list[NDArray[np.uint64]]:
    """Hash each band of signatures (rows, 128) to (rows,) 64 bits."""
    halves = np.ascontiguousarray(signatures).view(np.uint64).reshape(len(signatures), BANDS, NUM_PERM // BANDS // 4)
    return [mix(mix(halves[:, band, 0]) ^ halves[:, band, 1]) for band in range(BANDS)]


def find_duplicates(
    sources: Sequence[Source], columns: Columns | Sequence[str], how: str, examples: Examples, folder: Path, workers: int,
    *, max_rows: int | None = None, skip_bad_rows: bool = False,
) -> NDArray[np.bool_]:  # fmt: skip
    """Say which rows repeat an earlier one, by their number among the usable rows.

    Args:
        how: "exact" or "near".
        folder: for the files of the work, which are removed at the end; what an earlier attempt left there is used.
        workers: processes that sign rows.
    Returns:
        (usable rows,) bool, True for a row to leave out. The first of equal rows always stays.
    Memory:
        1 byte a row, and about 100 MB for the bucket in hand; on disk 8 bytes a row, or 384 with "near".
    """
    result = folder / RESULT
    if not result.is_file():
        _sign(sources, columns, how, examples, folder, workers, max_rows, skip_bad_rows)
        doubles = _exact(folder) if how == EXACT else _near(folder)
        with atomic_file(result) as temporary, temporary.open("wb") as file:
            np.save(file, doubles)
    for path in folder.glob("signatures.*"):
        path.unlink()
    (folder / STATE).unlink(missing_ok=True)
    return np.asarray(np.load(result))


def _names(how: str) -> list[str]:
    numbered = [f"signatures.{number:02d}" for number in range(BANDS)]
    return numbered[:1] if how == EXACT else [*numbered, "signatures.all"]


def _sign(
    sources: Sequence[Source], columns: Columns | Sequence[str], how: str, examples: Examples, folder: Path, workers: int,
    max_rows: int | None, skip_bad_rows: bool,
) -> None:  # fmt: skip
    """Append the signatures of all rows to files, from where an earlier attempt stopped."""
    paths = [folder / name for name in _names(how)]
    try:
        state = saved_state(folder / STATE)
    except ValueError:  # signed from the start
        state = None
    position, sizes = (Position(**state["position"]), state["sizes"]) if state else (Position(), [0] * len(paths))
    batches = read_batches(sources, columns, BadRows(skip_bad_rows), max_rows, position)
    with ExitStack() as stack:
        files = []
        for path, size in zip(paths, sizes, strict=True):
            path.touch()
            os.truncate(path, size)
            files.append(stack.enter_context(path.open("ab")))
        progress = stack.enter_context(ProgressLine(say("looking for duplicates"), position.rows))
        signed = stack.enter_context(workers_in_order(partial, (sign, how, examples), workers))
        for number, (batch, (size, arrays)) in enumerate(signed(batches), 1):
            for file, array in zip(files, arrays, strict=True):
                array.tofile(file)
            progress.add(len(batch.rows), size)
            if number % SAVE_BATCHES == 0:
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
                facts = {"position": asdict(batch.end), "sizes": [file.tell() for file in files]}
                save_state(folder / STATE, facts)


def _mapped(path: Path, dtype: type, width: int = 1) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros((0, width) if width > 1 else 0, dtype)
    array = np.memmap(path, dtype, "r")
    return array.reshape(-1, width) if width > 1 else array


def _exact(folder: Path) -> NDArray[np.bool_]:
    digests = _mapped(folder / "signatures.00", np.uint64)
    doubles = np.zeros(len(digests), np.bool_)
    _each_repeat(digests, doubles, lambda first, rows: rows)
    return doubles


def _near(folder: Path) -> NDArray[np.bool_]:
    signatures = _mapped(folder / "signatures.all", np.uint16, NUM_PERM)
    doubles = np.zeros(len(signatures), np.bool_)

    def similar(firsts: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        alike = []
        for begin in range(0, len(rows), PAIR_ROWS):
            part = slice(begin, begin + PAIR_ROWS)
            share = (signatures[firsts[part]] == signatures[rows[part]]).mean(axis=1)
            alike.append(rows[part][share >= SIMILAR])
        return np.concatenate(alike) if alike else rows[:0]

    for name in _names(NEAR)[:-1]:
        _each_repeat(_mapped(folder / name, np.uint64), doubles, similar)
    return doubles


def _each_repeat(
    digests: NDArray[np.uint64],
    doubles: NDArray[np.bool_],
    judge: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]],
) -> None:
    """Mark rows of equal digest: `judge(firsts, rows)` gets each such row with the first that stays, and picks."""
    buckets = max(1, -(-len(digests) // BUCKET_ROWS))
    for bucket in range(buckets):
        # the first row of each digest so far: all copies of a frequent text are in one bucket
        known = np.zeros(0, np.int64)
        for rows in _rows_of_bucket(digests, doubles, bucket, buckets):
            rows = np.concatenate([known, rows])
            values = digests[rows]
            order = np.argsort(values, kind="stable")
            rows, values = rows[order], values[order]
            repeats = np.flatnonzero(values[1:] == values[:-1]) + 1
            begins = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
            firsts = rows[begins[np.searchsorted(begins, repeats, side="right") - 1]]
            doubles[judge(firsts, rows[repeats])] = True
            known = rows[begins]


def _rows_of_bucket(
    digests: NDArray[np.uint64], doubles: NDArray[np.bool_], bucket: int, buckets: int
) -> Iterator[NDArray[np.int64]]:
    """Numbers of the rows that are not marked yet and whose digest falls into a bucket, in order, about BUCKET_ROWS at a time."""
    found, count = [], 0
    for begin in range(0, len(digests), BUCKET_ROWS):
        part = slice(begin, begin + BUCKET_ROWS)
        chosen = (digests[part] >> np.uint64(32)) % np.uint64(buckets) == bucket
        found.append(np.flatnonzero(chosen & ~doubles[part]) + begin)
        count += len(found[-1])
        if count >= BUCKET_ROWS:
            yield np.concatenate(found)
            found, count = [], 0
    if count:
        yield np.concatenate(found)
