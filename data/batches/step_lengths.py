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

MOST_ROWS = 400_000  # whose lengths are read: about a third of a second
MOST_PLACES = 1_000_000  # of the order that are computed
PLACES_AT_ONCE = 65_536  # a call for each step would take minutes
MOST_MADE_ROWS = 2_000  # that are read or made one by one
MOST_DRAWN_STEPS, MOST_DRAWN_ROWS = 256, 65_536  # that are made up from a sample
Lengths = NDArray[np.integer[Any]]
SHORT = 2**15  # below it, two lengths and their sum fit into 16 bits


@dataclass(frozen=True)
class StepLengths:
    """Tokens of the rows of steps, in the order in which one process cuts its micro-batches; a 0 is no row.

    Args:
        sources, targets: (S, R) whole numbers; with several processes, each one's share of a step is a row of its own.
        is_complete: whether no step is missing.
    Memory: they stay as long as the run, so they are held in 2 bytes each where rows are shorter than `SHORT`.
    """

    sources: Lengths
    targets: Lengths
    is_complete: bool

    def with_longest(self, longest: tuple[int, int]) -> StepLengths:
        """The same where all rows are among them; else with the longest of all data, which may be in a step that is
        missing, in place of the longest here.
        """
        if self.is_complete:
            return self
        dtype = self.sources.dtype if max(longest) < SHORT else np.int64
        sources, targets = self.sources.astype(dtype), self.targets.astype(dtype)
        # the last, where rows are sorted
        place = (sources.astype(np.int64) * (int(targets.max()) + 1) + targets).argmax()
        sources.flat[place], targets.flat[place] = longest
        return StepLengths(sources, targets, False)


def step_lengths(
    loader: StepLoader, split_dir: Path, steps: range, effective_batch_size: int, num_processes: int = 1
) -> StepLengths:
    """Look ahead at the steps of a run.

    Args:
        split_dir: the folder that the loader reads. steps: 0-based, as `StepLoader.micro_batches` counts them.
    Memory: 4 bytes a place of the order, of rows shorter than `SHORT`, and 20 more for a moment, up to the limits
    above.
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
        made = StepLengths(sources, targets, len(chosen) == len(steps))
        # How long a window becomes is drawn for each, so the steps that were looked at stand for all.
        return made if loader.task.is_windowed else made.with_longest(loader.longest)
    chosen = _spaced(steps, max(1, MOST_PLACES // effective_batch_size))
    lengths = _stored_lengths(Manifest.of(Path(split_dir)), Path(split_dir).name, loader)
    num_pieces = 1 + len(chosen) * effective_batch_size // PLACES_AT_ONCE
    pieces = np.array_split(np.array(chosen), num_pieces)
    numbers = np.concatenate([loader.rows_of_steps(piece, effective_batch_size) for piece in pieces])
    sources, targets = _by_process(lengths[0][numbers], lengths[1][numbers], num_processes, loader.sorts_rows)
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
    places = np.random.default_rng(0).integers(len(lengths[0]), size=(steps, effective_batch_size))
    sources = lengths[0][places]
    targets = lengths[1][places]
    sources[0, 0], targets[0, 0] = longest
    return StepLengths(*_by_process(sources, targets, num_processes, sorts_rows), False)


def evaluation_lengths(loader: StepLoader, max_rows: int, num_processes: int = 1) -> StepLengths:
    """The same of the rows of an evaluation, as one step."""
    rows = min(max_rows, loader.num_rows)
    if loader.task.has_even_lengths:
        return _even(loader, max(1, -(-rows // num_processes)))
    most = min(rows, MOST_MADE_ROWS)
    made = _made(loader.evaluation_batches(most, 64, rank, num_processes) for rank in range(num_processes))
    return StepLengths(*made, rows <= MOST_MADE_ROWS).with_longest(loader.longest)


def _even(loader: StepLoader, rows: int) -> StepLengths:
    """One step of rows that are all as long as the longest."""
    longest = np.ones((1, rows), np.int64)
    return StepLengths(longest * loader.longest[0], longest * loader.longest[1], True)


def _spaced(steps: range, most: int) -> Sequence[int]:
    """At most so many of the steps, evenly spread over the run."""
    if len(steps) <= most:
        return steps
    return [steps[int(place)] for place in np.linspace(0, len(steps) - 1, most)]


def _made(shares: Iterable[Iterable[Batch]]) -> tuple[Lengths, Lengths]:
    """Encoder and decoder tokens of batches that are read or made, those of each share in a row."""
    no_rows = np.zeros((2, 0), np.int64)
    sides = [
        np.concatenate(
            [no_rows, *(np.stack([batch.input_lengths, batch.decoder_lengths]) for batch in batches)], axis=1
        )
        for batches in shares
    ]
    most = max(1, *(side.shape[1] for side in sides))
    padded = np.stack([np.pad(side, ((0, 0), (0, most - side.shape[1]))) for side in sides])
    return padded[:, 0], padded[:, 1]


def _stored_lengths(manifest: Manifest, split: str, loader: StepLoader) -> tuple[Lengths, Lengths]:
    """Encoder and decoder tokens of every row, (rows,) each."""
    columns = list_lengths(manifest.files(split), loader.task.shards.columns)
    both = loader.task.stored_lengths(columns, loader.row_settings)
    is_short = max(int(side.max(initial=0)) for side in both) < SHORT
    return (both[0].astype(np.uint16), both[1].astype(np.uint16)) if is_short else both


def _by_process(sources: Lengths, targets: Lengths, num_processes: int, sorts_rows: bool) -> tuple[Lengths, Lengths]:
    """What each process takes of steps, (S, R) -> (S x processes, R / processes); sorted, rows of like length are side
    by side.
    """
    places = np.arange(sources.shape[1])
    shares = np.array_split(places, num_processes)
    if sorts_rows:
        order = np.argsort(sources.astype(np.int64) * (int(targets.max()) + 1) + targets, axis=1, kind="stable")
        sources = np.take_along_axis(sources, order, 1)
        targets = np.take_along_axis(targets, order, 1)
        shares = [places[rank::num_processes] for rank in range(num_processes)]
    return _in_shares(sources, shares), _in_shares(targets, shares)


def _in_shares(lengths: Lengths, shares: Sequence[NDArray[np.int64]]) -> Lengths:
    """The places of each share in a row, the first of which is the longest."""
    most = len(shares[0])
    return np.concatenate([np.pad(lengths[:, share], ((0, 0), (0, most - len(share)))) for share in shares])
