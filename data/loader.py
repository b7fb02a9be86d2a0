"""Which batches does one process see at one step?

A pure function of (step, process, micro-batch size): step s reads the places s x N .. (s + 1) x N of the endless order,
whatever the number of processes and the micro-batch. So an automatic decision about the micro-batch, a resume, or
another number of processes changes no row, no mask and no dropout. Nothing runs ahead: a row costs some ten
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from config import Config
from data.collate import Batch, Row, collate
from data.dataset import LowMemDataset, TokenStream
from data.objectives import corrupt, lengths_of, pairs
from data.order import Order, row_keys
from data.shards import COLUMNS, PAIRS, Manifest

EVALUATION_SEED = 0x5EED  # evaluation sees the same masks whatever the training seed


class StepLoader:
    """Batches of a split.

    Args:
        split_dir: `train_dir` or `validation_dir` of `Prepared`.
        objective: span, ul2, prefix or pairs.
        config: lengths, masking, `group_by_length` and seed.
        ultra_low_mem: open the shard anew for every read.
    Raises:
        UserError: the shards are incomplete or broken.
    Memory:
        the rows of one step.
    """

    def __init__(self, split_dir: Path, objective: str, config: Config, ultra_low_mem: bool = False) -> None:
        data = config.data
        manifest = Manifest.of(Path(split_dir))
        self.objective, self.special, self.seed = objective, manifest.special, config.run.seed
        self.density, self.mean_span = data.noise_density, data.mean_noise_span_length
        self.lengths = lengths_of(data, objective, len(self.special.sentinels))
        rows = LowMemDataset(manifest.files(Path(split_dir).name), COLUMNS[manifest.kind], ultra_low_mem)
        self._pairs = rows if manifest.kind == PAIRS else None
        self._windows = None if manifest.kind == PAIRS else TokenStream(rows, self.lengths.raw_tokens)
        self.num_rows = len(rows) if self._windows is None else len(self._windows)
        self._order = Order(self.num_rows, self.seed)
        self._sorts = data.group_by_length and objective == "pairs"

    def steps_per_epoch(self, effective_batch_size: int) -> int:
        """Steps until every row has been seen at least once."""
        return -(-self.num_rows // effective_batch_size)

    def micro_batches(
        self, step: int, *, effective_batch_size: int, batch_size: int, rank: int = 0, num_processes: int = 1
    ) -> list[Batch]:
        """Give the batches of one process at one step.

        Args:
            step: 0-based, counted over all epochs.
            effective_batch_size: rows of the step over all processes; batch_size: most rows of one batch.
        Returns:
            batches that hold, over all processes, each row of the step once; none where there are fewer rows than
            processes. With `group_by_length`, rows of a batch are of like length.
        """
        first = step * effective_batch_size
        row_numbers = self._order.rows(first, effective_batch_size)
        keys = row_keys(self.seed, np.arange(first, first + effective_batch_size))
        if self._sorts:
            rows = self._rows(row_numbers, keys)
            rows = sorted(rows, key=lambda row: row.lengths)[rank::num_processes]  # ties stay in the order of places
        else:
            share = np.array_split(np.arange(effective_batch_size), num_processes)[rank]
            rows = self._rows(row_numbers[share], keys[share])
        return [self._collate(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]

    def evaluation_batches(
        self, max_rows: int, batch_size: int, rank: int = 0, num_processes: int = 1
    ) -> Iterator[Batch]:
        """Give this process's part of the first `max_rows` rows, in file order, with masks that never change."""
        numbers = np.arange(min(max_rows, self.num_rows))[rank::num_processes]
        for start in range(0, len(numbers), batch_size):
            part = numbers[start : start + batch_size]
            yield self._collate(self._rows(part, row_keys(EVALUATION_SEED, part)))

    def _rows(self, numbers: NDArray[np.int64], keys: NDArray[np.uint64]) -> list[Row]:
        return [self._row(number, key) for number, key in zip(numbers.tolist(), keys.tolist(), strict=True)]

    def _row(self, number: int, key: int) -> Row:
        if self._pairs is not None:
            row = self._pairs[number]
            prompt, response = (row[name].astype(np.int64) for name in COLUMNS[PAIRS])
            return Row(*pairs(prompt, response, self.special, self.lengths), key)
        assert self._windows is not None
        window = self._windows[number]
        return Row(*corrupt(self.objective, window, key, self.special, self.lengths, self.density, self.mean_span), key)

    def _collate(self, rows: Sequence[Row]) -> Batch:
        return collate(rows, self.special.pad)
