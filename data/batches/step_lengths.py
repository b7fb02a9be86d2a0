"""Lengths of the rows of each step, known before the run starts, for the plan of its memory.

The order of the rows is a pure function of the step, so the lengths that the shards tell (the offsets of their lists,
no token is read) give every batch of the run in advance. Where that would take too long, evenly spaced steps stand for
all; where lengths depend on random masks (ul2, prefix), the steps that are looked at are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import Batch
from data.batches.loader import StepLoader
from data.shards.store import Manifest, list_lengths

MOST_ROWS = 400_000  # The lengths of more rows take more than a third of a second to read.
MOST_POSITIONS = 1_000_000  # More positions of the order are not computed.
POSITIONS_AT_ONCE = 65_536  # A call for each step would take minutes.
MOST_MADE_ROWS = 2_000  # More rows are not read or made one by one.
MOST_DRAWN_STEPS = 256  # More steps are not made up from a sample,
MOST_DRAWN_ROWS = 65_536  # nor more rows.
Lengths = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class StepLengths:
    """Tokens of the rows of steps, in the order in which one process cuts its micro-batches; a 0 is no row.

    Args:
        sources, targets: (S, R) whole numbers; with several processes, each one's share of a step is a row of its own.
        is_complete: whether no step is missing.
    """

    sources: Lengths
    targets: Lengths
    is_complete: bool

    def with_longest(self, longest: tuple[int, int]) -> StepLengths:
        """The same where all rows are among them; else with the longest of all data, which may be in a step that is
        missing, in place of the longest here, which is the last where rows are sorted.
        """
        if self.is_complete:
            return self
        sources = self.sources.copy()
        targets = self.targets.copy()
        index = _sort_key(sources, targets).argmax()
        sources.flat[index] = longest[0]
        targets.flat[index] = longest[1]
        return StepLengths(sources, targets, False)


def step_lengths(
    loader: StepLoader, split_dir: Path, steps: range, effective_batch_size: int, num_processes: int = 1
) -> StepLengths:
    """Look ahead at the steps of a run.

    Args:
        split_dir: the folder that the loader reads. steps: 0-based, as `StepLoader.micro_batches` counts them.
    Memory: 8 bytes a position of the order, and 20 more for a moment, up to the limits above.
    """
    if loader.task.has_even_lengths:
        return _even(loader, -(-effective_batch_size // num_processes))
    if loader.task.is_windowed or loader.num_rows > MOST_ROWS:
        chosen = _spaced(steps, max(1, MOST_MADE_ROWS // effective_batch_size))
        sources, targets = _made(
            loader.micro_batches(
                step,
                effective_batch_size=effective_batch_size,
                batch_size=effective_batch_size,
                rank=rank,
                num_processes=num_processes,
            )
            for step in chosen
            for rank in range(num_processes)
        )
        looked_at = StepLengths(sources, targets, len(chosen) == len(steps))
        # How long a window becomes is drawn for each, so the steps that were looked at stand for all.
        return looked_at if loader.task.is_windowed else looked_at.with_longest(loader.longest)
    chosen = _spaced(steps, max(1, MOST_POSITIONS // effective_batch_size))
    manifest = Manifest.of(Path(split_dir))
    columns = list_lengths(manifest.files(Path(split_dir).name), loader.task.shards.columns)
    of_rows = loader.task.stored_lengths(columns, loader.row_settings)
    num_pieces = 1 + len(chosen) * effective_batch_size // POSITIONS_AT_ONCE
    pieces = np.array_split(np.array(chosen), num_pieces)
    numbers = np.concatenate([loader.rows_of_steps(piece, effective_batch_size) for piece in pieces])
    sources, targets = (lengths.astype(np.int32)[numbers] for lengths in of_rows)
    sources, targets = _by_process(sources, targets, num_processes, loader.sorts_rows)
    return StepLengths(sources, targets, len(chosen) == len(steps)).with_longest(loader.longest)


def drawn_lengths(
    lengths: tuple[Lengths, Lengths],
    longest: tuple[int, int],
    effective_batch_size: int,
    num_processes: int = 1,
    sorts_rows: bool = False,
    most_steps: int = MOST_DRAWN_STEPS,
) -> StepLengths:
    """Steps of rows that are drawn from a sample, for data whose order is not known yet; the same ones each time.

    Args:
        lengths: (N,) tokens of encoder and decoder of the rows of the sample. longest: of the one row that is put to
            them.
        sorts_rows: whether a step's rows are sorted by length. most_steps: that are drawn.
    """
    steps = max(1, min(most_steps, MOST_DRAWN_ROWS // effective_batch_size))
    numbers = np.random.default_rng(0).integers(len(lengths[0]), size=(steps, effective_batch_size))
    sources = lengths[0][numbers]
    targets = lengths[1][numbers]
    sources[0, 0] = longest[0]
    targets[0, 0] = longest[1]
    return StepLengths(*_by_process(sources, targets, num_processes, sorts_rows), False)


def evaluation_lengths(loader: StepLoader, max_rows: int, num_processes: int = 1) -> StepLengths:
    """The same of the rows of an evaluation, as one step."""
    rows = min(max_rows, loader.num_rows)
    if loader.task.has_even_lengths:
        return _even(loader, max(1, -(-rows // num_processes)))
    most = min(rows, MOST_MADE_ROWS)
    sides = _made(loader.evaluation_batches(most, 64, rank, num_processes) for rank in range(num_processes))
    return StepLengths(*sides, rows <= MOST_MADE_ROWS).with_longest(loader.longest)


def _even(loader: StepLoader, rows: int) -> StepLengths:
    """One step of rows that are all as long as the longest."""
    sources, targets = (np.full((1, rows), length, np.int64) for length in loader.longest)
    return StepLengths(sources, targets, True)


def _spaced(steps: range, most: int) -> Sequence[int]:
    """At most so many of the steps, evenly spread over the run."""
    if len(steps) <= most:
        return steps
    return [steps[int(index)] for index in np.linspace(0, len(steps) - 1, most)]


def _made(shares: Iterable[Iterable[Batch]]) -> tuple[Lengths, Lengths]:
    """Encoder and decoder tokens of batches that are read or made, those of each share in a row."""
    sides = list[NDArray[np.int64]]()
    for batches in shares:
        lengths = [np.stack([batch.encoder_lengths, batch.decoder_lengths]) for batch in batches]
        sides.append(np.concatenate([np.zeros((2, 0), np.int64), *lengths], axis=1))
    most = max(1, *(side.shape[1] for side in sides))
    padded = np.stack([np.pad(side, ((0, 0), (0, most - side.shape[1]))) for side in sides])
    return padded[:, 0], padded[:, 1]


def _by_process(sources: Lengths, targets: Lengths, num_processes: int, sorts_rows: bool) -> tuple[Lengths, Lengths]:
    """What each process takes of steps, (S, R) -> (S x processes, R / processes); sorted, rows of like length are side
    by side.
    """
    indices = np.arange(sources.shape[1])
    shares = np.array_split(indices, num_processes)
    if sorts_rows:
        order = np.argsort(_sort_key(sources, targets), axis=1, kind="stable")
        sources = np.take_along_axis(sources, order, 1)
        targets = np.take_along_axis(targets, order, 1)
        shares = [indices[rank::num_processes] for rank in range(num_processes)]
    return _in_shares(sources, shares), _in_shares(targets, shares)


def _sort_key(sources: Lengths, targets: Lengths) -> NDArray[np.int64]:
    """A number for each row that orders rows by the tokens of the encoder, then of the decoder."""
    return sources.astype(np.int64) * (int(targets.max()) + 1) + targets


def _in_shares(lengths: Lengths, shares: Sequence[NDArray[np.int64]]) -> Lengths:
    """The columns of each share in rows of their own, padded to the first share, which is the longest."""
    most = len(shares[0])
    return np.concatenate([np.pad(lengths[:, share], ((0, 0), (0, most - len(share)))) for share in shares])
