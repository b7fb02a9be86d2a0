"""The parts of blocks (`model.block_parts`), compiled by torch: on a GPU a step of small operations is bound by their
launches.

Nothing is compiled before its first use. The number of tokens is a variable of each graph, so that steps of any length
run the same code; there is one graph for each function with dropout, without it, and where a block is recomputed.
Backward is a function of its own: its graph knows no autograd, which costs the host half of the time of a call.
torch's compiler keeps what it has compiled in a folder, so that a later run begins faster. Of several kernels it takes
one by its own rules and times none: a repeated run has the same bits, and nothing is allocated for measurements.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from devices import machine_file
from devices.threads import keep_threads
from model.block_parts import BlockParts

INDUCTOR = "inductor"
# One function has graphs with and without dropout and the last product, for each set of trained weights.
MOST_GRAPHS = 64
# This is how many first arguments of each function of `BlockParts` have a line for each token.
TOKEN_ARGUMENTS = (1, 5, 2, 4, 2, 5)
# No kernel is chosen by its time, which would also take memory; no matrix is padded.
OPTIONS: dict[str, Any] = {"deterministic": True, "triton.autotune_pointwise": False, "shape_padding": False}


def compile_parts(backend: str = INDUCTOR) -> BlockParts:
    """The functions that blocks are made of; each is compiled when it first runs.

    Args:
        backend: of `torch.compile`; others than inductor are for tests.
    Memory: `memory.estimate.workload.COMPILER_BYTES` of RAM.
    """
    _prepare_compiler()
    # torch would compile anew for another number of threads, though it changes nothing on a GPU.
    keep_threads()
    from torch._dynamo import config

    config.specialize_float = True
    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    return BlockParts(
        *[_compiled(part, count, backend) for part, count in zip(BlockParts(), TOKEN_ARGUMENTS, strict=True)]
    )


def compiler_failure(device: torch.device) -> str:
    """What torch says where its compiler, or a tool that this calls, fails on this machine; empty where it works."""
    _prepare_compiler()
    try:
        torch.compile(lambda x: x.square().sum(), fullgraph=True, dynamic=False)(torch.ones(64, device=device))
    except Exception as error:  # Compilers, drivers and linkers fail in ways of their own.
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ""


def _prepare_compiler() -> None:
    """Settings that the compiler reads when it is imported."""
    # A process of its own for each kernel would count to the run's RAM.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with suppress(OSError):  # Without a home it keeps its files in the system's folder for temporary ones.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(machine_file.location().with_name("inductor")))


def _compiled(part: Callable[..., Any], count: int, backend: str) -> Callable[..., Any]:
    """A compiled function of which the first arguments, so many, have a line for each token."""
    options: dict[str, Any] | None = None
    if backend == INDUCTOR:
        options_here = torch._inductor.list_options()  # Some are newer than torch 2.9.
        options = {name: value for name, value in OPTIONS.items() if name in options_here}
    compiled = torch.compile(part, backend=backend, fullgraph=True, dynamic=False, options=options)

    def run(*arguments: Any) -> Any:
        for tensor in arguments[:count]:
            if tensor is not None:
                torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(*arguments)

    return run
