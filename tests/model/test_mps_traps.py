"""What a step asks of MPS, traced without one: operators that it has, in forms that it computes right.

Which operators it has, torch declares itself (`native_functions.yaml` of torchgen, which comes with torch). The traps
are reports to PyTorch: overlapping operands of products (167154, 180236), results written into strided memory (macOS
14), sums of 32,767 terms and more (195163).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.traced.traced_step import TracedWork, trace
from benchmarks.traced.tracing import Tracer
from devices.sizes import MPS_INNER
from settings.declared import T5ModelConfig

SHAPE = T5ModelConfig(vocab_size=320, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_decoder_layers=1, num_heads=4)
TWO_BLOCKS = replace(SHAPE, num_decoder_layers=2)  # The second takes the bias of positions of the first.
LENGTHS = ((40, 12), (33, 9), (7, 3), (90, 30))
PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
    "mv": (0, 1),
}
WORKS = {
    "in pieces": TracedWork(TWO_BLOCKS, "mps", LENGTHS, dropout=0.1, saved=1, micro_batch=2, scores=4000),
    "muon, gated": TracedWork(replace(SHAPE, feed_forward_proj="gated-gelu"), "mps", LENGTHS, optimizer="muon"),
    "many tokens, adapters": TracedWork(SHAPE, "mps", ((4000, 20),) * 9, chunk_bytes=1 << 27, lora_rank=16),
}


@lru_cache
def traced_work(name: str) -> Tracer:
    return trace(WORKS[name], keeps_calls=True)


@pytest.fixture(params=WORKS)
def traced(request: pytest.FixtureRequest) -> Tracer:
    """Traced once for all tests: those of a module come in a drawn order, which makes its fixtures anew each time."""
    return traced_work(request.param)


@lru_cache
def declared() -> dict[str, dict[str, Any]]:
    """Operator with its overload -> what torch declares."""
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {entry["func"].partition("(")[0]: entry for entry in yaml.load(path.read_text(), loader)}


def has_mps(name: str, names_before: tuple[str, ...] = ()) -> bool:
    """Whether an operator has a kernel for MPS, or is made of others."""
    entry = declared().get(name)
    if entry is None or name in names_before:
        return False
    kinds = {kind.strip() for key in entry.get("dispatch", {}) for kind in key.split(",")}
    if "dispatch" not in entry and "structured_delegate" not in entry:
        return True  # composite
    if kinds & {
        "MPS",
        "CompositeExplicitAutograd",
        "CompositeImplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    }:
        return True
    return "structured_delegate" in entry and has_mps(entry["structured_delegate"], (*names_before, name))


def calls(tracer: Tracer) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    for func, args, kwargs, result in tracer.calls:
        yield func._schema.name.removeprefix("aten::"), (*args, *kwargs.values()), result


def test_every_operator_is_there(traced: Tracer) -> None:
    names = {str(func).removeprefix("aten.").removesuffix(".default") for func, *_ in traced.calls}
    assert len(names) > 50
    ours = ("frugalt5.",)  # Metal compiles these: see `devices.pointwise`.
    assert not {name for name in names if not has_mps(name) and not name.startswith(ours)}
    assert not has_mps("_efficient_attention_forward"), "or the question says nothing"


def test_no_tensor_is_float64_and_none_of_one_integer_is_computed_with(traced: Tracer) -> None:
    for name, args, result in calls(traced):
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
        assert all(x.dtype != torch.float64 for x in tensors), name
        if not traced.kernels[name]:
            continue
        assert all(x.dim() or x.is_floating_point() for x in tensors if x.is_meta), f"{name} waits for the GPU"


def test_no_operand_of_a_product_overlaps_itself(traced: Tracer) -> None:
    count = 0
    for name, args, _ in calls(traced):
        for index in PRODUCTS.get(name, ()):
            count += 1
            assert is_plain(args[index]), name
    assert count > 50


def is_plain(x: Tensor) -> bool:
    """Whether each number has its own place: contiguous, but for the order of its sides and gaps between them."""
    sides = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    return all(stride >= step * size for (step, size), (stride, _) in pairwise(sides)) and all(
        stride for stride, _ in sides
    )


def test_products_write_into_memory_without_gaps(traced: Tracer) -> None:
    for name, args, result in calls(traced):
        if name in PRODUCTS or name.endswith(("softmax", "vector_norm")):
            out = args[0] if name.endswith("_") and not name.startswith("_") else result
            assert out.is_contiguous(), name


def test_no_sum_of_a_product_is_too_long(traced: Tracer) -> None:
    for name, args, _ in calls(traced):
        if name in PRODUCTS:
            assert args[PRODUCTS[name][0]].shape[-1] <= MPS_INNER < 32_767, name


def test_the_host_waits_at_most_twice(traced: Tracer) -> None:
    assert sum(traced.waits.values()) <= 2, traced.waits
