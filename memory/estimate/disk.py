"""Bytes that a run will write, and whether there is room, known before its first step.

A new checkpoint is whole before an old one goes, so that for a moment one more lies there than is kept, and the best one
may lie beside the latest. The published model shares the files of its checkpoint (hard links). Logs are a few hundred bytes
a step.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from language import say
from memory.estimate.precision import dtype_bytes
from memory.estimate.weight_offload import away_bytes, taken_bytes
from memory.estimate.workload import FILE, ExecutionPlan, Workload, state_bytes, trained_counts
from model.shapes import token_range, weight_counts
from settings.declared import Config
from settings.fields import AUTO, counted
from units import format_size

IN_MEMORY = ("tmpfs", "ramfs")  # whose files take RAM that no process is told to hold
TOKEN_BYTES = 100  # A token takes 68 bytes in the files of t5's tokenizer and 82 in those of mt5's.
BESIDE_BYTES = (
    512 * 1024
)  # Settings, sums, the state of the run, and a tokenizer's rules, which take 240 KB in a spiece.model.
DAY_SECONDS = 24 * 3600
LOG_BYTES = 512  # of a step, in the log and in metrics.jsonl


@dataclass(frozen=True)
class DiskNeed:
    """What a run writes at most.

    Args:
        checkpoint_bytes: of one checkpoint, all its files. checkpoints: that lie there together.
        log_bytes: of all steps; 0 where their number is not known.
        file_bytes: of weights offloaded to a file while the run lasts. file_dir: where; None: with the checkpoints.
        daily_bytes: written into that file in a day of training; what wears a disk.
    """

    checkpoint_bytes: int
    checkpoints: int
    log_bytes: int
    file_bytes: int = 0
    file_dir: str | None = None
    daily_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Checkpoints, logs, and weights offloaded here."""
        beside = self.file_bytes if self.file_dir is None else 0
        return self.checkpoints * self.checkpoint_bytes + self.log_bytes + beside

    @property
    def least_bytes(self) -> int:
        """Without which the first save fails."""
        return self.checkpoint_bytes + (self.file_bytes if self.file_dir is None else 0)

    def describe(self) -> str:
        """In words."""
        size = format_size(self.checkpoint_bytes)
        kept = counted(self.checkpoints, "checkpoint")
        if self.checkpoints == 1:
            kept = say("{checkpoints} of {size}", checkpoints=kept, size=size)
        else:
            total = format_size(self.checkpoints * self.checkpoint_bytes)
            kept = say("{checkpoints} of {size} each, {total} together", checkpoints=kept, size=size, total=total)
        if not self.file_bytes:
            return kept
        weights, written = format_size(self.file_bytes), format_size(self.daily_bytes)
        if not self.daily_bytes:
            return say("{kept}; {weights} of weights, read only", kept=kept, weights=weights)
        told = "{kept}; {weights} of weights, {written} written per day"
        return say(told, kept=kept, weights=weights, written=written)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def disk_need(config: Config, storage: str, choice: ExecutionPlan | None = None, step_seconds: float = 0.0) -> DiskNeed:
    """Count what a run with these settings writes.

    Args:
        storage: dtype name of the stored weights. choice: where they are kept; None: in memory.
        step_seconds: of a step, as predicted.
    """
    model, train = config.model, config.train
    trained = trained_counts(config) if train.freeze or config.lora.lora_rank else None
    work = Workload(model, 1, 1, 1, False, train.optimizer, trained=trained)
    adapters = 0
    if trained and config.lora.lora_rank:
        adapters = trained.adapters + trained.parts["embedding"] + trained.parts["head"]
    if adapters and token_range(config.lora.lora_tokens) is not None:  # PEFT takes a head of its own whole
        adapters += weight_counts(model)["head"]
    weights = 4 * adapters if adapters else weight_counts(model)["total"] * dtype_bytes(storage)
    most, steps = train.keep_latest_n_ckp + 2, 0
    if train.max_steps != AUTO:
        steps = int(train.max_steps)
        often = [steps // int(every) for every in (train.save_steps, train.eval_steps) if every != AUTO]
        most = min(most, 1 + sum(often)) if len(often) == 2 else most
    beside = model.vocab_size * TOKEN_BYTES + BESIDE_BYTES
    need = DiskNeed(weights + state_bytes(work) + beside, most, steps * LOG_BYTES)
    if choice is None or choice.weights_in != FILE:
        return need
    folder = None if config.memory.weights_dir == AUTO else config.memory.weights_dir
    daily = int(taken_bytes(work, choice) * DAY_SECONDS / step_seconds) if step_seconds else 0
    return replace(need, file_bytes=away_bytes(work, choice), file_dir=folder, daily_bytes=daily)


def free_bytes(folder: str | Path) -> int:
    """Free space where a folder is, or will be made."""
    place = Path(folder).absolute()
    while not place.is_dir():
        place = place.parent
    return shutil.disk_usage(place).free


@cache
def is_in_memory(folder: Path) -> bool:
    """Whether what is written into a folder, which need not be there yet, rests in RAM, as on tmpfs; False where nobody says."""
    import psutil

    place = Path(os.path.realpath(folder))
    try:
        mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    except (OSError, psutil.Error):
        return False
    return next((mounts[above] for above in (place, *place.parents) if above in mounts), "") in IN_MEMORY


def too_full(need: DiskNeed, output_dir: str | Path, held_bytes: int = 0) -> tuple[list[str], list[str]]:
    """Compare what a run writes with what is free.

    Args:
        held_bytes: of checkpoints that the run has already, and will drop for newer ones.
    Returns:
        what stands against it, as `UserError` takes it: not even one checkpoint fits; and what is to be told: not all fit.
    """
    free = free_bytes(output_dir)
    place = say("--output_dir = {folder}, has {size} free", folder=output_dir, size=format_size(free))
    problems = list[str]()
    if free < need.least_bytes:
        size = format_size(need.checkpoint_bytes)
        if need.least_bytes > need.checkpoint_bytes:
            size = say("{size} plus {weights} of weights", size=size, weights=format_size(need.file_bytes))
        told = "{place}, but one checkpoint takes {size}; free some space or choose another --output_dir"
        problems += [say(told, place=place, size=size)]
    if need.file_dir is not None and (there := free_bytes(need.file_dir)) < need.file_bytes:
        problems += [
            say(
                "--weights_dir = {file_dir}, has {size} free, and the weights take {other_size}; free space or "
                "choose another",
                file_dir=need.file_dir,
                size=format_size(there),
                other_size=format_size(need.file_bytes),
            )
        ]
    if problems:
        return problems, []
    if free + held_bytes < need.total_bytes:
        told = (
            "{place}, but the run will write {need} and fail at a save unless space is freed; lower "
            "--keep_latest_n_ckp or choose another --output_dir"
        )
        return [], [say(told, place=place, need=need.describe())]
    return [], []
