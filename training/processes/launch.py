"""What a launcher's environment says: which process of the run this is, and which attempt of the launch.

accelerate and torchrun set the same variables; without a launcher there is one process, number 0. Imports no torch, so
that a refusal can ask before torch is loaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.language import join, say

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# With one of these, accelerate hands a whole run over to another engine.
ENGINES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
# From these accelerate reads the number of processes, in this order.
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


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
    text = (
        "{name} = {environ}, is another engine's: here each process holds the whole model; use torchrun, or a "
        "configuration of accelerate without it"
    )
    return [
        say(text, name=name, environ=os.environ[name])
        for name in ENGINES
        if os.environ.get(name, "false").lower() not in ("false", "0", "")
    ]


def launch_problems() -> list[str]:
    """Find what is wrong with the variables by which a launcher says that this process is one of several."""
    numbers = {name: os.environ[name] for name in ("LOCAL_RANK", "RANK", *SIZES) if name in os.environ}
    text = "{name} = {value}, is not a whole number; unset it, or start the processes with torchrun"
    problems: list[str] = [
        say(text, name=name, value=value) for name, value in numbers.items() if not value.removeprefix("-").isdecimal()
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
        "MASTER_ADDR = none, is needed where {signs} say that a launcher has started this process; for one process "
        "unset them, for several start this program by torchrun --nproc_per_node=N, or set MASTER_ADDR to the host of "
        "process 0"
    )
    return [say(text, signs=join(", ", signs))]


def is_first_to_end() -> bool:
    """Whether this process ends before all others of its run, and so says why: what ends the others follows from that.

    Before the processes have met, all come to the same end, and process 0 says so.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return rank() == 0
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.add(f"ended/{restarts()}", 1) == 1)
    except RuntimeError:  # The process with the store is gone.
        return True
    except KeyboardInterrupt:  # The launcher ends this process, because another one has ended.
        return False


def restarts() -> int:
    """How often torchrun has started this run again."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def launch_folder() -> Path | None:
    """torchrun's folder for this launch on this machine: the same for each of its attempts, and no other launch has it.

    Source: torch 2.13, distributed/elastic/multiprocessing/api.py, `DefaultLogsSpecs.reify`:
    FOLDER/attempt_0/0/error.json.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[2] if error_file else None


def may_be_restarted() -> bool:
    """Whether torchrun starts the run again after an exit code that is not 0."""
    return _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0


def meets_where_the_last_met() -> bool:
    """Whether a restart would find addresses of the attempt before it, where torch's processes meet: some then wait for
    ever.

    Source: torch 2.13, distributed/rendezvous.py, which counts on a new store for each attempt.
    """
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get(OWN_STORES) != "1"
    return num_processes() > 1 and may_be_restarted() and is_shared


def _number(name: str, default: int) -> int:
    said = os.environ.get(name, "")
    return int(said) if said.isdigit() else default
