"""The batches that one process sees at one step.

A pure function of (step, process, micro-batch size): step s reads the places s x N .. (s + 1) x N of the endless order,
whatever the number of processes and the micro-batch. So an automatic decision about the micro-batch, a resume, or
another number of processes changes no row, no mask and no dropout. Nothing runs ahead: a row costs some ten
microseconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL, AnyRow, Batch
from data.batches.mixture import Mixture, named_weights
from data.batches.order import Order, row_keys
from data.batches.rows import RowSettings
from data.dataset import FILE, REOPEN, LowMemDataset
from data.shards.store import TRAIN, Manifest
from data.sources.files import set_names
from data.sources.places import public
from data.task import ShardFormat, TaskProtocol
from settings.declared import DataConfig, T5ModelConfig
from settings.errors import UserError
from settings.tasks import task_named
from support.language import join, say

BLOCKS_FROM_BYTES = 16 * 1024**3  # Shards from this size on may not fit the page cache: neighbours are read together.
BLOCK_ROWS = 256
CONTENT_ROWS = 256  # Rows are known to be the same by so many, which takes a moment however many there are.
EVALUATION_SEED = 0x5EED  # Evaluation sees the same masks whatever the training seed.


class TokenRows(Sequence[dict[str, Any]]):
    """The rows of a split, each checked at every read.

    An id after the vocabulary would end the run in the middle of a step, on a GPU without a word about where it came
    from. The check costs two passes over some hundred numbers.

    Args:
        rows: of the columns of `format`.
        vocab_size: the highest id and 1.
        folder: of the split, for messages.
        num_labels: how many labels there are; 0: they are numbers to be predicted.
    Raises:
        UserError: there are no rows; on reading one, it holds something else than ids.
    """

    def __init__(
        self, rows: LowMemDataset, format: ShardFormat, vocab_size: int, folder: Path, num_labels: int
    ) -> None:
        self._rows = rows
        self._id_columns = [name for name in format.columns if name != format.label_column]
        self._label_column = format.label_column
        self._has_targets = format.has_targets
        self._vocab_size = vocab_size
        self._folder = folder
        self._num_labels = num_labels
        if not len(rows):
            raise UserError("{place}: holds no rows; delete the folder and prepare it again", place=folder)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        row = self._rows[index]
        for name in self._id_columns:
            problem = self._problem_of(name, row[name])
            if problem:
                raise UserError(
                    "{place}, row {index}: {problem}; delete the folder and prepare it again",
                    place=self._folder,
                    index=index + 1,
                    problem=problem,
                )
        if self._label_column and not self._are_labels(row[self._label_column], len(row["input_ids"])):
            raise UserError(
                "{place}, row {index}: its labels do not match the labels of the folder; delete it and prepare it "
                "again",
                place=self._folder,
                index=index + 1,
            )
        return row

    def _problem_of(self, name: str, ids: Any) -> str:
        if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "ui":
            return say("{name} is {kind}, not token ids", name=name, kind=type(ids).__name__)
        # In one pass: read as unsigned, an id below 0 is a very large one.
        if np.maximum.reduce(ids.view(f"u{ids.itemsize}"), initial=0) < self._vocab_size:
            return ""
        return say(
            "{name} holds the id {wrong}, the tokenizer has ids 0 to {vocab_size:,}",
            name=name,
            wrong=ids[(ids < 0) | (ids >= self._vocab_size)][0],
            vocab_size=self._vocab_size - 1,
        )

    def _are_labels(self, labels: Any, tokens: int) -> bool:
        """Whether these are labels of a text of so many tokens: one, or one for each; or the targets of a row."""
        if not isinstance(labels, np.ndarray) or not (self._has_targets or len(labels) in (1, tokens)):
            return False
        if not self._num_labels:
            return bool(labels.dtype.kind == "f")
        is_class = (labels == IGNORED_LABEL) | ((labels >= 0) & (labels < self._num_labels))
        return bool(labels.dtype.kind == "i" and is_class.all())


class StepLoader:
    """Batches of a split.

    Args:
        split_dir: `train_dir` or `validation_dir` of `Prepared`.
        objective: a key of `settings.tasks.TASKS`.
        data: lengths, masking, mixture, `group_by_length` and `batch_tokens`.
        model: whether a decoder reads the rows too.
        seed: of order and masks.
        ultra_low_mem: open the shard anew for every read.
    Raises:
        UserError: the shards are incomplete or broken, here or when a row is read. Their checksums: see `check_shards`.
    Memory:
        the batches of one step, and the rows of one batch; of a step whose rows are sorted all rows, while they are
        collated.

    Attributes:
        longest: encoder and decoder tokens of the longest rows that can come, all answers of a row together.
        longest_answer: of the first answer of a row.
        sets: of a split of validation sets with names, the numbers of each one's rows; else empty.
    """

    def __init__(
        self,
        split_dir: Path,
        objective: str,
        data: DataConfig,
        model: T5ModelConfig,
        seed: int,
        ultra_low_mem: bool = False,
    ) -> None:
        manifest = Manifest.of(Path(split_dir))
        split = Path(split_dir).name
        self.objective = objective
        self.task: TaskProtocol = task_named(objective)
        self.seed = seed
        self.lengths = self.task.lengths(data, len(manifest.special.sentinels))
        self.row_settings = RowSettings(
            lengths=self.lengths,
            special=manifest.special,
            noise_density=data.noise_density,
            mean_noise_span=data.mean_noise_span_length,
            decodes=model.num_decoder_layers > 0,
        )
        format = self.task.shards
        dataset = LowMemDataset(manifest.files(split), format.columns, mode=REOPEN if ultra_low_mem else FILE)
        rows = TokenRows(dataset, format, manifest.vocab_size, split_dir, len(manifest.label_names))
        self._rows = self.task.rows_of(rows, self.lengths)
        self.num_rows = len(self._rows)
        self._tokens = manifest.counts(split).get("tokens", 0)
        inputs, *answers = self.task.longest(manifest.lengths(split), self._rows, self.row_settings)
        self.longest = inputs, sum(answers)
        self.longest_answer = answers[0]
        self.sorts_rows = data.group_by_length and not self.task.is_windowed
        self.max_tokens = data.batch_tokens or math.inf
        self.reopens = ultra_low_mem
        self.reference: NDArray[np.float32] | None = None
        parts = manifest.parts(split)
        part_names = [part["name"] for part in parts]
        part_sizes = np.array(self.task.part_rows(parts, self._rows))
        # The order follows from the data alone: another machine must give the same one.
        size = sum(file.stat().st_size for file in manifest.files(split))
        block_rows = BLOCK_ROWS if size >= BLOCKS_FROM_BYTES else 0
        self._order: Order | Mixture = Order(self.num_rows, self.seed, block_rows)
        self.sets: dict[str, range] = {}
        if split != TRAIN:
            self.sets = _rows_of_sets(data.validation_file, part_names, part_sizes)
        elif data.mixture_weights is not None:
            weights = np.array(named_weights(data.mixture_weights, part_names))
            has_rows = part_sizes > 0
            self._order = Mixture(part_sizes[has_rows].tolist(), weights[has_rows].tolist(), self.seed, block_rows)

    def attach(self, reference: NDArray[np.float32]) -> None:
        """Let the log-probabilities of both answers of each row (rows, 2) under the reference model ride along."""
        self.reference = reference

    def content(self) -> str:
        """16 hex digits that change with the rows: their number, all their tokens, and which these are in 256 rows.

        Those lie evenly spaced. How and where rows are stored does not count, nor do masks and order.
        """
        digest = hashlib.sha256(f"{self.num_rows} {self._tokens}".encode())
        for number in np.unique(np.linspace(0, self.num_rows - 1, CONTENT_ROWS).astype(np.int64)).tolist():
            for ids in self._rows[number].values():
                with np.errstate(invalid="ignore"):  # A target may be NaN.
                    digest.update(ids.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def micro_batches(
        self,
        step: int,
        *,
        effective_batch_size: int,
        batch_size: int,
        rank: int = 0,
        num_processes: int = 1,
    ) -> list[Batch]:
        """Give the batches of one process at one step.

        Args:
            step: 0-based, counted over all epochs.
            effective_batch_size: rows of the step over all processes; batch_size: most rows of one batch.
        Returns:
            batches that hold, over all processes, each row of the step once, and at most `batch_tokens` encoder and
            decoder tokens (a longer row is a batch of its own); none where there are fewer rows than processes. With
            `group_by_length`, rows of a batch are of like length.
        """
        positions = step * effective_batch_size + np.arange(effective_batch_size)
        row_numbers = self._order.rows(positions)
        keys = row_keys(self.seed, positions)
        if self.sorts_rows:  # Ties stay in the order of positions.
            sorted_rows = sorted(self._read(row_numbers, keys), key=lambda row: row.lengths)[rank::num_processes]
            sorted_rows.reverse()
            # A row that was given is not held any more.
            rows: Iterator[AnyRow] = (sorted_rows.pop() for _ in range(len(sorted_rows)))
        else:
            share = np.array_split(np.arange(effective_batch_size), num_processes)[rank]
            rows = self._read(row_numbers[share], keys[share])
        return [self._collate(group) for group in filled(rows, batch_size, self.max_tokens)]

    def evaluation_batches(
        self, max_rows: int, batch_size: int, rank: int = 0, num_processes: int = 1, rows: range | None = None
    ) -> Iterator[Batch]:
        """Give this process's part of the first `max_rows` rows, in file order, with masks that never change.

        Args:
            rows: of one of `sets`; None: all.
        """
        numbers = np.array((rows or range(self.num_rows))[:max_rows])[rank::num_processes]
        for start in range(0, len(numbers), batch_size):
            yield self.batch_of(numbers[start : start + batch_size])

    def batch_of(self, numbers: NDArray[np.int64]) -> Batch:
        """Give the rows of these numbers as one batch, with the keys of evaluation."""
        return self._collate(list(self._read(numbers, row_keys(EVALUATION_SEED, numbers))))

    def rows_of_steps(self, steps: NDArray[np.int64], effective_batch_size: int) -> NDArray[np.int64]:
        """Numbers of the rows that steps (S,) see: (S, effective_batch_size)."""
        positions = steps[:, None] * effective_batch_size + np.arange(effective_batch_size)
        return self._order.rows(positions.ravel()).reshape(positions.shape)

    def _read(self, numbers: NDArray[np.int64], keys: NDArray[np.uint64]) -> Iterator[AnyRow]:
        """Read rows, each when it is asked for."""
        for number, key in zip(numbers.tolist(), keys.tolist(), strict=True):
            row = self.task.row(self._rows[number], key, self.row_settings)
            if self.reference is not None:
                row = replace(row, reference=np.array(self.reference[number]))  # type: ignore[arg-type]
            yield row

    def _collate(self, rows: Sequence[AnyRow]) -> Batch:
        return self.task.collate(rows, self.row_settings.special.pad)


def _rows_of_sets(spec: str | None, parts: Sequence[str], sizes: NDArray[np.int64]) -> dict[str, range]:
    """The numbers of the rows of each validation set with a name.

    Args:
        spec: `--validation_file`. parts, sizes: names of the parts of the split, and their rows.
    """
    ends = np.cumsum([0, *sizes.tolist()]).tolist()
    rows = dict(zip(parts, map(range, ends, ends[1:]), strict=True))
    names = set_names(spec)
    empty = [name for name in names if not rows.get(name)]
    if empty:
        raise UserError(
            "--validation_file = {spec}, {lacking} has no row to evaluate on; give a file with more text",
            spec=public(str(spec)),
            lacking=join(", ", empty),
        )
    return {name: rows[name] for name in names}


def filled(rows: Iterable[AnyRow], batch_size: int, max_tokens: float) -> Iterator[list[AnyRow]]:
    """Part rows, in their order, into as few groups as `batch_size` rows and `max_tokens` tokens allow. Memory: one
    group.
    """
    group: list[AnyRow] = []
    tokens = 0
    for row in rows:
        size = sum(row.lengths)
        if group and (len(group) == batch_size or tokens + size > max_tokens):
            yield group
            group = []
            tokens = 0
        group.append(row)
        tokens += size
    if group:
        yield group
