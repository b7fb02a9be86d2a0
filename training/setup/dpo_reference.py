"""The reference model's log-probability of each answer, computed once before training and kept on disk.

A preference run that trains all weights compares with the model it started from. Holding that model beside the one in
training would double the weights; its log-probabilities are two numbers a row. They are computed in a phase of their
own that takes no more memory than evaluation, for the rows that the run will see, and stored beside the shards, tied to
the model's weights, the dtypes and the data. A row that is not known is NaN, so a phase that was interrupted continues
where it stopped; a resumed run reads the numbers it began with, which its folder names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches.loader import StepLoader
from data.shards.store import Manifest
from engine.blockwise import Blockwise
from engine.objectives.preference import answer_log_probabilities
from engine.step import to_micro_batch
from memory.cleanup import clean_all
from model.formats.adapter_folder import is_adapter, read_info
from settings.errors import UserError, reason_of
from support.language import say
from support.storage import atomic_file, fingerprint, is_unreadable, make_folder, read_text, remove, write_text, writing
from training.report.wording import duration
from training.saved_model import SavedModel
from training.setup.build import build
from training.setup.resolved import Beginning, ResolvedRun

FORMAT = 1  # raise it when the same rows would get other numbers
BLOCK_ROWS = 1024  # rows between two writes to the file
LINE_SECONDS = 10.0
RECORD = "reference.json"
# A run may pass over batches and read later ones for them: so many, or that share of its steps.
LEFT_OUT = 3
LEFT_OUT_SHARE = 0.02
_STORE = re.compile(r"reference-[0-9a-f]{16}")


def attach_reference(run: ResolvedRun, tell: Callable[[str], None]) -> None:
    """Give both loaders of a run the reference log-probabilities of the rows it will see; computed where not stored.

    Args:
        run: its folder exists.
    Raises:
        UserError: the reference model has changed or is gone, and rows are missing; or the disk is full.
    Memory: the model and one micro-batch of evaluation; 1 byte a row; 8 bytes a row on disk.
    """
    # A resumed run keeps the reference it has, even where the adapter it began with is gone and cannot be told from a
    # model.
    if not (run.run_dir / RECORD).is_file() and not run.config.task.stores_reference(
        run.config.train, run.config.preference, run.config.lora
    ):
        return
    steps = run.spec.run_steps
    group = run.group
    record = group.run_on_main(partial(_record, run))
    folder = Path(run.config.data.cache_dir, record.folder).absolute()
    spare = max(LEFT_OUT, int(LEFT_OUT_SHARE * steps.max_steps))
    skipped = 0 if run.state.divergence is None else len(run.state.divergence["skipped"])
    if skipped > spare:
        spare += skipped
    trained = _rows_of_first_steps(run.loader, steps.max_steps + spare, steps.effective_batch_size)
    evaluated = np.arange(run.validation.num_rows) < run.config.train.eval_rows
    blockwise: Blockwise | None = None
    for name, loader, rows in (("train", run.loader, trained), ("validation", run.validation, evaluated)):
        store = ReferenceStore(folder / f"{name}.npy", loader.num_rows, group.is_first_here)
        if store.was_damaged:
            tell(say("{path}: is damaged, it is made anew", path=store.path))
        group.wait()
        unknown = torch.from_numpy((rows & store.unknown()).astype(np.int32))
        numbers = np.flatnonzero(group.all_reduce(unknown).numpy())  # Machines need not share their disk.
        if len(numbers):
            blockwise = blockwise or _reference_model(run, folder, record.model)
            _compute(run, blockwise, loader, store, numbers, tell)
        group.wait()
        loader.attach(store.read())
    if blockwise is not None:
        del blockwise
        clean_all(run.device)


def _compute(
    run: ResolvedRun,
    blockwise: Blockwise,
    loader: StepLoader,
    store: ReferenceStore,
    numbers: NDArray[np.int64],
    tell: Callable[[str], None],
) -> None:
    """Store the log-probabilities of these rows, block by block; told every few seconds is how far it is."""
    what = say("reference log-probabilities of {name} rows", name=store.path.stem)
    count = f"{len(numbers):,}"
    tell(say("{what}: {count} to compute", what=what, count=count))
    began = time.monotonic()
    last_line = began
    for first in range(0, len(numbers), BLOCK_ROWS):
        block = numbers[first : first + BLOCK_ROWS]
        store.write(block, _log_probabilities(run, blockwise, loader, block))
        now = time.monotonic()
        if now - last_line > LINE_SECONDS:
            done = first + len(block)
            remaining = duration((now - began) / done * (len(numbers) - done))
            text = "{what}: {done} of {count}, {time} left"
            tell(say(text, what=what, done=f"{done:,}", count=count, time=remaining))
            last_line = now


class ReferenceStore:
    """Log-probabilities of both answers of each row, (rows, 2) float32 on disk; NaN where not known.

    Args:
        path: made if it is not there, and anew where it is damaged.
        is_writer: other processes only read.
    Raises:
        UserError: it cannot be read, or the disk is full or cannot be written.
    """

    def __init__(self, path: Path, num_rows: int, is_writer: bool = True) -> None:
        self.path = path
        self.num_rows = num_rows
        self.is_writer = is_writer
        self.was_damaged = is_writer and path.exists() and not self._is_sound()
        if is_writer and (self.was_damaged or not path.exists()):
            self._make()

    def _make(self) -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.num_rows, 2)}
        with writing("cache_dir", self.path.parent):
            make_folder(self.path.parent)
            remove(self.path)
            with atomic_file(self.path) as fresh, fresh.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for first in range(0, self.num_rows, 1 << 16):
                    np.full((min(1 << 16, self.num_rows - first), 2), np.nan, "<f4").tofile(file)

    def read(self) -> NDArray[np.float32]:
        """All rows, mapped: what is not read takes no memory.

        Raises:
            UserError: the file is none of these, or cannot be read.
        """
        try:
            rows: NDArray[np.float32] = np.load(self.path, mmap_mode="r")
            size = self.path.stat().st_size - rows.offset  # type: ignore[attr-defined]
            if (rows.dtype.str, rows.shape, size) != ("<f4", (self.num_rows, 2), 8 * self.num_rows):
                raise ValueError(say("it holds {dtype} of shape {shape}", dtype=rows.dtype, shape=rows.shape))
            return rows
        except Exception as error:  # Numpy reads the header as a piece of Python, and has many errors for it.
            reason = reason_of(error)
            if is_unreadable(error):
                raise UserError(
                    "{path}: cannot be read ({reason}); name another folder with --cache_dir",
                    path=self.path,
                    reason=reason,
                ) from error
            raise UserError(
                "{path}, is damaged ({reason}); remove it, it is computed anew", path=self.path, reason=reason
            ) from None

    def _is_sound(self) -> bool:
        try:
            self.read()
            return True
        except UserError as error:
            if is_unreadable(error):
                raise
            return False

    def unknown(self) -> NDArray[np.bool_]:
        """(rows,) whether a row is still to be computed."""
        unknown: NDArray[np.bool_] = np.isnan(self.read()).max(axis=1)
        return unknown

    def write(self, rows: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Put values (n, 2) at rows (n,), ascending; on return they are on the disk."""
        if not self.is_writer:
            return
        with writing("cache_dir", self.path.parent), self.path.open("r+b") as file:
            offset = self.path.stat().st_size - 8 * self.num_rows
            breaks = np.flatnonzero(np.diff(rows) != 1) + 1
            for run, part in zip(np.split(rows, breaks), np.split(values.astype("<f4"), breaks), strict=True):
                file.seek(offset + 8 * int(run[0]))
                file.write(part.tobytes())
            file.flush()
            os.fsync(file.fileno())  # A block takes seconds to compute, this milliseconds.


@dataclass(frozen=True)
class _Record:
    """Which reference a run has, as `reference.json` in its folder says: it names no place, only what lies in the
    cache.

    Args:
        folder: of the stores. model: digest of the weights. content: digests of the rows, training and held out.
    """

    folder: str
    model: str
    content: list[str]


def _record(run: ResolvedRun) -> _Record:
    """The record that the run has, or a new one, written; of the same model where its rows have changed since."""
    path = run.run_dir / RECORD
    content = [run.loader.content(), run.validation.content()]
    folder = Path(str(run.config.train.finetune_from))  # `find_base` has put it into the settings.
    if path.is_file():
        earlier = _read_record(path)
        if earlier.content == content:
            return earlier
        model = earlier.model
    else:
        model = model_digest(folder)
    splits = ((run.prepared.train_dir, run.loader), (run.prepared.validation_dir, run.validation))
    data = [
        [Manifest.of(split).content["fingerprint"], split.name, loader.num_rows, asdict(loader.lengths)]
        for split, loader in splits
    ]
    choice = run.spec.plan.choice
    facts: list[Any] = [FORMAT, model, choice.storage, choice.compute, data]
    if is_adapter(folder):
        facts.append(asdict(read_info(folder).settings))  # The digest is of its weights alone.
    record = _Record(f"reference-{fingerprint(facts)}", model, content)
    write_text(path, json.dumps(asdict(record)) + "\n")
    return record


def _read_record(path: Path) -> _Record:
    try:
        about = json.loads(read_text(path))
        record = _Record(Path(about["folder"]).name, str(about["model"]), list(about["content"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            "{place}, cannot be read ({error}); copy it again, or start another run", place=path, error=error
        ) from None
    if not _STORE.fullmatch(record.folder):
        raise UserError(
            "{place}, names {folder!r}, which no run writes; copy it again, or start another run",
            place=path,
            folder=record.folder,
        )
    return record


def model_digest(folder: Path) -> str:
    """16 hex digits of a model's shape and all its weights, an adapter's base with it.

    Memory: 1 MiB; time: one reading of the files.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in dict.fromkeys((folder, SavedModel.read(folder).base)):
        shapes = [*part.glob("config.json"), *part.glob("adapter_config.json")]
        for path in [*shapes, *sorted([*part.glob("*.safetensors"), *part.glob("*.bin")])]:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
    return digest.hexdigest()


def _reference_model(run: ResolvedRun, store: Path, model: str) -> Blockwise:
    folder = Path(str(run.config.train.finetune_from))
    if not run.group.run_on_main(lambda: folder.is_dir() and model_digest(folder) == model):
        raise UserError(
            "--finetune_from = {folder}, is not the model any more that this run has as its reference, and not "
            "all of the reference log-probabilities are in {store}; restore one of the two, or start another run",
            folder=folder,
            store=store,
        )
    # Each process has the whole reference, by a group of its own.
    beginning = Beginning(
        config=run.config, device=run.device, base=folder, moved_base=run.moved_base, tokenizer=run.tokenizer
    )
    return build(beginning, run.spec.plan.choice).blockwise


def _rows_of_first_steps(loader: StepLoader, steps: int, effective_batch_size: int) -> NDArray[np.bool_]:
    is_read = np.zeros(loader.num_rows, np.bool_)
    at_once = max(1, (1 << 16) // effective_batch_size)
    for first in range(0, steps, at_once):
        is_read[loader.rows_of_steps(np.arange(first, min(first + at_once, steps)), effective_batch_size)] = True
    return is_read


def _log_probabilities(
    run: ResolvedRun, blockwise: Blockwise, loader: StepLoader, block: NDArray[np.int64]
) -> NDArray[np.float32]:
    """(rows, 2) of the rows of a block, of which each process computes its share."""
    group = run.group
    batch_size = run.spec.plan.choice.eval_batch_size_per_gpu
    values = torch.zeros(len(block), 2)
    mine = np.arange(group.rank, len(block), group.size)
    for first in range(0, len(mine), batch_size):
        indices = mine[first : first + batch_size]
        part = to_micro_batch(loader.batch_of(block[indices]), blockwise.model.config, run.device.torch_device)
        (losses,) = blockwise.token_losses([part])
        values[torch.from_numpy(indices)] = answer_log_probabilities(losses, part).t().float()
    return group.all_reduce(values).numpy()
