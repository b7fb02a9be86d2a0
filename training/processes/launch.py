"""What does a launcher say of this process? Its place among the processes of a run, from the environment.

accelerate and torchrun set the same variables; without a launcher there is one process, number 0. Imports nothing, so
that a refusal can ask before torch is loaded.
"""

from __future__ import annotations

import os

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
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


def _number(name: str, default: int) -> int:
    said = os.environ.get(name, "")
    return int(said) if said.isdigit() else default
