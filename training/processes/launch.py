"""This process's rank and place among the processes of a run, from the launcher's environment.

accelerate and torchrun set the same variables; without a launcher there is one process, number 0. Imports nothing to begin
with, so that a refusal can ask before torch is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from language import join, say

RESTARTS, JOB = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"
OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ENGINES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")  # which accelerate hands a whole run over to
CAUSE = "told/cause"  # a key in the store of the run
SAME_WORD_SECONDS = 2.0  # in which processes come to the same end
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


def foreign_engines() -> list[str]:
    """What is wrong with a configuration of accelerate that wants the run to be another program's."""
    asked = [name for name in ENGINES if os.environ.get(name, "false").lower() not in ("false", "0", "")]
    return [
        say(
            "{name} = {environ}, is another engine's: here each process holds the whole model; use torchrun, or a "
            "configuration of accelerate without it",
            name=name,
            environ=os.environ[name],
        )
        for name in asked
    ]


def launch_problems() -> list[str]:
    """Find what is wrong with the variables by which a launcher says that this process is one of several."""
    numbers = {name: os.environ[name] for name in ("LOCAL_RANK", "RANK", *SIZES) if name in os.environ}
    problems: list[str] = [
        say(
            "{name} = {value}, is not a whole number; unset it, or start the processes with torchrun",
            name=name,
            value=value,
        )
        for name, value in numbers.items()
        if not value.removeprefix("-").isdecimal()
    ]
    if problems:
        return problems
    if rank() >= max(1, num_processes()) and "WORLD_SIZE" in numbers:
        text = "RANK = {rank}, is not less than WORLD_SIZE ({size}); start the processes with torchrun, which sets both"
        return [say(text, rank=rank(), size=num_processes())]
    # What makes accelerate look for other processes (accelerate 1.15, state.py, `_prepare_backend`).
    signs = [f"{name}={numbers[name]}" for name in SIZES if int(numbers.get(name, 1)) > 1]
    if int(numbers.get("LOCAL_RANK", -1)) != -1:
        signs.append(f"LOCAL_RANK={numbers['LOCAL_RANK']}")
    if not signs or os.environ.get("MASTER_ADDR"):
        return []
    text = (
        "MASTER_ADDR = none, is needed where {signs} say that a launcher has started this process; for one process unset "
        "them, for several start this program by torchrun --nproc_per_node=N, or set MASTER_ADDR to the host of process 0"
    )
    return [say(text, signs=join(", ", signs))]


def is_told_elsewhere(text: str, is_cause: bool = True) -> bool:
    """Whether another process of this run tells the same: process 0, or without its word the first of the others.

    Until the processes have met, process 0 speaks for all.

    Args:
        is_cause: whether it is why the run ends. What only follows from that is told where nobody has told a cause.
    """
    dist = sys.modules.get("torch.distributed")
    if num_processes() == 1:
        return False
    if dist is None or not dist.is_initialized():
        return rank() > 0
    store, key = dist.distributed_c10d._get_default_store(), f"told/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        if not is_cause and store.check([CAUSE]):
            return True
        if is_cause:
            store.set(CAUSE, "")
        if rank() == 0:
            store.set(key, "")
            return False
        deadline = time.monotonic() + SAME_WORD_SECONDS
        while time.monotonic() < deadline:
            if store.check([key]):
                return True
            time.sleep(0.05)
        return int(store.add(f"{key}/others", 1)) > 1
    except RuntimeError:  # the process that had the store is gone
        return False
    except KeyboardInterrupt:  # the launcher ends this process, since one has told it and gone
        return True


def restarts() -> int:
    """How often torchrun has started this run again."""
    return _number(RESTARTS, 0)


def launch_marks() -> list[str]:
    """What the attempts of this torchrun have in common: its own process on this machine, which no other start has, and
    between machines the name of its job, which another may have too. None without torchrun.
    """
    if RESTARTS not in os.environ:
        return []
    several = _number("GROUP_WORLD_SIZE", 1) > 1
    return [_launcher(), *([os.environ[JOB]] if several and _named_job() else [])]


def is_restart_of(marks: Sequence[str], by_job: bool = True) -> bool:
    """Whether torchrun has started this process again after the attempt that left these `launch_marks`.

    Args:
        by_job: whether the name of the job is enough.
    """
    if restarts() == 0:
        return False
    return _launcher() in marks or (by_job and _named_job() and os.environ[JOB] in marks)


def meets_where_the_last_met() -> bool:
    """Whether a restart would find addresses of the attempt before it, where torch's processes meet: some then wait for ever.

    Source: torch 2.13, distributed/rendezvous.py, which counts on a new store for each attempt.
    """
    restarts_allowed = _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get(OWN_STORES) != "1"
    return num_processes() > 1 and restarts_allowed and is_shared


def _named_job() -> bool:
    return os.environ.get(JOB, "none") != "none"


def _launcher() -> str:
    """The process of torchrun: the nearest above this one that was not started by it. A script may lie between them."""
    import psutil

    try:
        above = next(parent for parent in psutil.Process().parents() if RESTARTS not in parent.environ())
        begun = f"{above.create_time():.2f}"
        with suppress(OSError):  # by a clock that nobody sets, under Linux
            begun = Path(f"/proc/{above.pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{platform.node()} {above.pid} {begun}"
    except (psutil.Error, OSError, StopIteration):  # in a container of its own, or another user's
        return f"{platform.node()} unknown"


def _number(name: str, default: int) -> int:
    said = os.environ.get(name, "")
    return int(said) if said.isdigit() else default
