"""The parts of blocks (`model.block_parts`), compiled by torch: on a GPU a step of small operations is bound by their launches.

Nothing is compiled before its first use. The number of tokens is a variable of each graph, so that steps of any length run the
same code; there is one graph for each function with gradients, without them, without dropout, and where a block is recomputed.
torch's compiler keeps what it has compiled in a folder, so that a later run begins faster. Of several kernels it takes one by
its own rules and times none: a repeated run has the same bits, and nothing is allocated for measurements.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from devices import machine_file
from devices.threads import keep_threads
from model.block_parts import BlockParts

INDUCTOR = "inductor"
# Of one function: with and without gradients, dropout, a last product, the gradient of the input, for each set of trained weights.
MOST_GRAPHS = 64
FOLDER = "inductor"
# No kernel is chosen by its time, which would also take memory; no matrix is padded.
OPTIONS: dict[str, Any] = {"deterministic": True, "triton.autotune_pointwise": False, "shape_padding": False}


def compile_parts(backend: str = INDUCTOR) -> BlockParts:
    """The functions that blocks are made of; each is compiled when it first runs.

    Args:
        backend: of `torch.compile`; others than inductor are for tests.
    Memory: `memory.estimate.workload.COMPILER_BYTES` of RAM.
    """
    # Read when the compiler is imported. A process of its own for each kernel would count to the run's RAM.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with suppress(OSError):  # Without a home it keeps its files in the system's folder for temporary ones.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(machine_file.place().with_name(FOLDER)))
    # torch would compile anew for another number of threads, though it changes nothing on a GPU.
    keep_threads()
    from torch._dynamo import config

    config.specialize_float = True
    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    return BlockParts(*[_compiled(part, backend) for part in BlockParts()])


def _compiled(part: Callable[..., Any], backend: str) -> Callable[..., Any]:
    options: dict[str, Any] | None = None
    if backend == INDUCTOR:
        known = torch._inductor.list_options()  # Some are newer than torch 2.9.
        options = {name: value for name, value in OPTIONS.items() if name in known}
    compiled = torch.compile(part, backend=backend, fullgraph=True, dynamic=False, options=options)
    return partial(_run, compiled)


def _run(compiled: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """Call a function whose first one or two matrices have a token in each row; only vectors of weights follow those."""
    torch._dynamo.mark_dynamic(x, 0)
    if arguments[0].dim() == 2:
        torch._dynamo.mark_dynamic(arguments[0], 0)
    return compiled(x, *arguments)
