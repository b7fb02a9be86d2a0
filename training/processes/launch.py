"""What does a launcher say of this process? Its place among the processes of a run, from the environment.

accelerate and torchrun set the same variables; without a launcher there is one process, number 0. Imports nothing to begin
with, so that a refusal can ask before torch is loaded.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

RESTARTS, JOB = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"
BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"  # which it always sets, also for one process
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate reads them


def rank() -> int:
    """The number of this process among all of the run."""
    return _number("RANK", 0)


def num_processes() -> int:
    """Processes of this run on all machines."""
    return _number("WORLD_SIZE", 1)


def is_alone() -> bool:
    """Whether this process is the whole run, whichever launcher accelerate may hear of."""
    return all(_number(name, 1) <= 1 for name in SIZES)


def local_rank() -> int:
    """The number of this process on this machine."""
    return _number("LOCAL_RANK", 0)


def local_processes() -> int:
    """Processes of this run on this machine."""
    return _number("LOCAL_WORLD_SIZE", 1)


def is_launched() -> bool:
    """Whether torchrun or accelerate has started this process."""
    return RESTARTS in os.environ or BY_ACCELERATE in os.environ


def restarts() -> int:
    """How often torchrun has started this run again."""
    return _number(RESTARTS, 0)


def launch_marks() -> list[str]:
    """What all attempts of this torchrun have in common and no other start has: its own process on this machine, and between
    machines the name of its job. None without torchrun.
    """
    if RESTARTS not in os.environ:
        return []
    import psutil

    launcher = psutil.Process(os.getppid())
    here = f"{platform.node()} {launcher.pid} {launcher.create_time():.2f}"
    return [here, os.environ.get(JOB, "none")] if _number("GROUP_WORLD_SIZE", 1) > 1 else [here]


def is_restart_of(marks: Sequence[str]) -> bool:
    """Whether torchrun has started this process again after the attempt that left these `launch_marks`."""
    job = os.environ.get(JOB, "none")
    return restarts() > 0 and any(mark in (job, *launch_marks()) for mark in marks if mark != "none")


def _number(name: str, default: int) -> int:
    said = os.environ.get(name, "")
    return int(said) if said.isdigit() else default
