"""Bytes that a run will write, and whether the disk holds them, known before its first step.

A new checkpoint is whole before an old one goes, so that for a moment one more lies there than is kept, and the best
one may lie beside the latest. The published model shares the files of its checkpoint (hard links).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memory.estimate.precision import dtype_bytes
from memory.estimate.weight_offload import offloaded_bytes, written_back_bytes
from memory.estimate.workload import FILE, ExecutionPlan, Workload, state_bytes, trained_counts
from model.shapes import token_range
from settings.declared import Config
from settings.fields import AUTO, counted
from support.language import say
from support.units import format_size

IN_MEMORY = ("tmpfs", "ramfs")  # Their files take RAM that no process is charged with.
TOKEN_BYTES = 100  # A token takes 68 bytes in the files of t5's tokenizer and 82 in those of mt5's.
# Settings, sums, the state of the run, and a tokenizer's rules, which take 240 KB in a spiece.model.
BESIDE_BYTES = 512 * 1024
DAY_SECONDS = 24 * 3600
LOG_BYTES = 512  # A step takes so many in the log and in metrics.jsonl.


@dataclass(frozen=True)
class DiskNeed:
    """What a run writes at most.

    Args:
        checkpoint_bytes: of one checkpoint, all its files. checkpoints: that lie there together.
        log_bytes: of all steps; 0 where their number is not known.
        file_bytes: of weights offloaded to a file while the run lasts. file_dir: its folder; None: that of the
            checkpoints.
        daily_bytes: written into that file in a day of training; what wears a disk.
    """

    checkpoint_bytes: int
    checkpoints: int
    log_bytes: int
    file_bytes: int = 0
    file_dir: str | None = None
    daily_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """Without which the first save fails: a checkpoint, and weights offloaded beside it."""
        return self.checkpoint_bytes + (self.file_bytes if self.file_dir is None else 0)

    @property
    def total_bytes(self) -> int:
        """All checkpoints, logs, and weights offloaded beside them."""
        return self.least_bytes + (self.checkpoints - 1) * self.checkpoint_bytes + self.log_bytes

    def describe(self) -> str:
        """In words."""
        size = format_size(self.checkpoint_bytes)
        count = counted(self.checkpoints, "checkpoint")
        text = say("{checkpoints} of {size}", checkpoints=count, size=size)
        if self.checkpoints > 1:
            total = format_size(self.checkpoints * self.checkpoint_bytes)
            text = say("{checkpoints} of {size} each, {total} together", checkpoints=count, size=size, total=total)
        weights = format_size(self.file_bytes)
        if self.daily_bytes:
            written = format_size(self.daily_bytes)
            return say(
                "{kept}; {weights} of weights, {written} written per day", kept=text, weights=weights, written=written
            )
        return say("{kept}; {weights} of weights, read only", kept=text, weights=weights) if self.file_bytes else text

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def disk_need(config: Config, storage: str, choice: ExecutionPlan | None = None, step_seconds: float = 0.0) -> DiskNeed:
    """Count what a run with these settings writes.

    Args:
        storage: dtype name of the stored weights. choice: where they are kept; None: in memory.
        step_seconds: of a step, as predicted.
    """
    train = config.train
    trained = trained_counts(config.model, config.lora, train.freeze)
    work = Workload(config.model, 1, 1, 1, False, train.optimizer, trained=trained)
    weights = work.counts["total"] * dtype_bytes(storage)
    if trained.adapters:
        # Adapters alone are saved, in fp32; beside rows of added tokens PEFT saves a whole head.
        head = work.counts["head"] if token_range(config.lora.lora_tokens) is not None else 0
        weights = 4 * (trained.adapters + trained.parts["embedding"] + trained.parts["head"] + head)
    checkpoints = train.keep_latest_n_ckp + 2
    steps = 0 if train.max_steps == AUTO else int(train.max_steps)
    if steps and AUTO not in (train.save_steps, train.eval_steps):
        saves = 1 + steps // int(train.save_steps) + steps // int(train.eval_steps)
        checkpoints = min(checkpoints, saves)
    file_bytes = offloaded_bytes(work, choice) if choice is not None and choice.weights_in == FILE else 0
    daily_bytes = 0
    if choice is not None and file_bytes and step_seconds:
        daily_bytes = int(written_back_bytes(work, choice) * DAY_SECONDS / step_seconds)
    return DiskNeed(
        weights + state_bytes(work) + config.model.vocab_size * TOKEN_BYTES + BESIDE_BYTES,
        checkpoints,
        steps * LOG_BYTES,
        file_bytes,
        None if config.memory.weights_dir == AUTO else config.memory.weights_dir,
        daily_bytes,
    )


def free_bytes(folder: str | Path) -> int:
    """Free space where a folder is, or will be made."""
    path = Path(folder).absolute()
    while not path.is_dir():
        path = path.parent
    return shutil.disk_usage(path).free


@cache
def is_in_memory(folder: Path) -> bool:
    """Whether files of a folder, which need not be there yet, are held in RAM, as on tmpfs; False where that is not
    known.
    """
    import psutil

    path = Path(os.path.realpath(folder))
    try:
        mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    except (OSError, psutil.Error):
        return False
    return next((mounts[above] for above in (path, *path.parents) if above in mounts), "") in IN_MEMORY


def too_full(need: DiskNeed, output_dir: str | Path, held_bytes: int = 0) -> tuple[list[str], list[str]]:
    """Compare what a run writes with what is free.

    Args:
        held_bytes: of checkpoints that the run has already, and will drop for newer ones.
    Returns:
        what stands against it, as `UserError` takes it: not even one checkpoint fits; and what to tell: not all fit.
    """
    problems = list[str]()
    free = free_bytes(output_dir)
    folder_state = say("--output_dir = {folder}, has {size} free", folder=output_dir, size=format_size(free))
    if free < need.least_bytes:
        size = format_size(need.checkpoint_bytes)
        if need.least_bytes > need.checkpoint_bytes:
            size = say("{size} plus {weights} of weights", size=size, weights=format_size(need.file_bytes))
        problems.append(
            say(
                "{place}, but one checkpoint takes {size}; free some space or choose another --output_dir",
                place=folder_state,
                size=size,
            )
        )
    if need.file_dir is not None and free_bytes(need.file_dir) < need.file_bytes:
        problems.append(
            say(
                "--weights_dir = {file_dir}, has {size} free, and the weights take {other_size}; free space or "
                "choose another",
                file_dir=need.file_dir,
                size=format_size(free_bytes(need.file_dir)),
                other_size=format_size(need.file_bytes),
            )
        )
    if problems or free + held_bytes >= need.total_bytes:
        return problems, []
    note = say(
        "{place}, but the run will write {need} and fail at a save unless space is freed; lower "
        "--keep_latest_n_ckp or choose another --output_dir",
        place=folder_state,
        need=need.describe(),
    )
    return [], [note]
