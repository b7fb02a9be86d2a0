"""Blocks compiled by torch give the losses and gradients of blocks as they are; one set of graphs serves all steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from devices.base import CUDA, override_traits
from devices.kernels import calls
from devices.threads import use_threads
from devices.torch_compiler import why_not_for_cpu
from engine.compiled import compile_parts, compiler_failure
from memory.estimate.blocks import NO_ADAPTERS
from memory.estimate.blocks import BlockEstimate as PlannedBlock
from memory.estimate.shapes import Tokens
from model.block_parts import BlockParts, place_dropout_keys, run_block
from model.dropout import Dropout
from model.rows import dense_sides
from tests.engine.small_models import (
    Rectangle,
    assert_near,
    blockwise_of,
    rectangle_gradients,
    reference_gradients,
    small_model,
)

pytestmark = [  # Torch's own compiler raises these, and hides them or not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
GPU = replace(CUDA, has_fused_attention=False)  # A CPU has none of its kernels.


@pytest.fixture(autouse=True)
def dense_rows() -> Iterator[None]:
    torch.compiler.reset()
    calls.use(False)
    with override_traits("cpu", GPU):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("family", "activation", "saved", "backend"),
    [
        ("t5", "relu", 2, "aot_eager"),
        ("t5-v1.1", "gated-gelu", 0, "eager"),
        # Its blocks differ by an activation and by whose bias of positions they add.
        pytest.param("umt5", "gated-silu", 99, "eager", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_plain_model(family: str, activation: str, saved: int, backend: str) -> None:
    model = small_model(family, feed_forward_proj=activation)
    blockwise = blockwise_of(model, saved, parts=compile_parts(backend))
    assert_near(rectangle_gradients(blockwise, Rectangle()), reference_gradients(model, Rectangle()))


def test_recomputed_blocks_drop_what_they_dropped_and_steps_of_any_length_run_the_same_graphs() -> None:
    model = small_model("t5-v1.1")
    parts = compile_parts("eager")
    expected = rectangle_gradients(blockwise_of(model, 99, rate=0.3, parts=BlockParts()), Rectangle())
    compiled = blockwise_of(model, 2, rate=0.3, parts=parts)
    assert_near(rectangle_gradients(compiled, Rectangle()), expected)
    other_mask, _ = rectangle_gradients(blockwise_of(model, rate=0.3), Rectangle())
    assert other_mask != pytest.approx(expected[0], rel=1e-3)
    assert float(compiled.loss(Rectangle().micro_batches(model, [[0, 1, 2, 3]]))) > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, source, target in ((4, 90, 9), (7, 30, 60), (5, 4, 3)):
            rectangle_gradients(compiled, Rectangle(rows, source, target))


@pytest.mark.parametrize(("family", "rate"), [("t5-v1.1", 0.1)])
def test_a_block_saves_what_is_planned(family: str, rate: float) -> None:
    model = small_model(family, d_model=64, d_kv=16, d_ff=192)
    lengths = ((64, 32),) * 8
    sources, targets = zip(*lengths, strict=True)
    rows, target_rows = dense_sides(sources, targets, torch.arange(8))
    tokens = Tokens(rows.num_tokens, target_rows.num_tokens)
    parts = BlockParts()
    encoder_output = torch.randn(rows.num_tokens, 64, requires_grad=True)
    for name, stack in model.stacks.items():
        own = target_rows if stack.blocks[1].is_decoder else rows
        x = torch.randn(own.num_tokens, 64, requires_grad=True)
        keys = place_dropout_keys(own, [stack.blocks[1].site], stack.is_decoder, x.device)[0].detach() if rate else None
        bias = None if stack.bias is None else stack.bias(own.longest).detach().requires_grad_()
        saved = dict[int, int]()

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run_block(
                parts,
                stack.blocks[1],
                x,
                bias=bias,
                dropout=Dropout(rate, own),
                keys=keys,
                encoder_output=encoder_output,
                encoder_rows=rows,
            )
        inputs = [tensor for tensor in (x, bias, keys, encoder_output, *model.parameters()) if tensor is not None]
        for tensor in inputs:
            saved.pop(tensor.untyped_storage().data_ptr(), None)
        block = PlannedBlock(
            model.config,
            name,
            e=4,
            stream=4,
            tokens=tokens,
            rows=lengths,
            answers=1,
            dropout=rate > 0,
            kernels=False,
            scores=2**26,
            is_fused=False,
            adapted=NO_ADAPTERS,
            compiled=True,
        )
        assert result.requires_grad and 0.97 < sum(saved.values()) / sum(block.saved(tokens)) < 1.02


def test_threads_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = use_threads("auto")
    assert not threads.is_fixed
    compile_parts("eager")
    assert threads.is_fixed, "torch compiles anew for another number of them"
    use_threads(torch.get_num_threads())


@pytest.mark.slow
def test_a_compiler_that_fails_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if reason := why_not_for_cpu():
        pytest.skip(reason)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compiler_failure(torch.device("cpu")) == ""
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("false",))
    assert compiler_failure(torch.device("cpu"))
