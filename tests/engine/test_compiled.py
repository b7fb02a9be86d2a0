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
from engine.blockwise import Blockwise
from engine.compiled import compile_parts, compiler_failure
from engine.weights import WeightStore
from memory.estimate.blocks import Block as PlannedBlock
from memory.estimate.shapes import Tokens
from model.block_parts import BlockParts, dropped, place_dropout_keys, run_block
from model.dropout import Dropout
from model.loss import LossSettings
from model.reference import T5Reference
from model.rows import dense_sides, side_by_side
from model.t5 import T5
from tests.engine.small_models import Rectangle, relative_error, small_model

pytestmark = [  # Torch's own compiler raises these, and hides them or not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
GPU = replace(CUDA, is_fused=False)  # A CPU has none of its kernels.


@pytest.fixture(autouse=True)
def dense_rows() -> Iterator[None]:
    torch.compiler.reset()
    calls.use(False)
    with override_traits("cpu", GPU):
        yield
    torch.compiler.reset()


def gradients(
    model: T5, batch: Rectangle, saved: int, parts: BlockParts | None, rate: float = 0.0
) -> tuple[float, dict[str, torch.Tensor]]:
    blockwise = Blockwise(model, saved, WeightStore(torch.float32), LossSettings(), rate, parts=parts)
    loss = float(blockwise.gradients(batch.micro_batches(model, [[0, 3], [1, 2]]), batch.num_labels))
    assert float(blockwise.loss(batch.micro_batches(model, [[0, 1, 2, 3]]))) > 0
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return loss, grads


@pytest.mark.parametrize(
    ("family", "activation", "saved", "backend"),
    [
        ("t5", "relu", 2, "aot_eager"),
        ("t5-v1.1", "gated-gelu", 0, "eager"),
        ("umt5", "gated-silu", 99, "eager"),
    ],
)
def test_gradients_are_those_of_blocks_as_they_are_and_of_the_plain_model(
    family: str, activation: str, saved: int, backend: str
) -> None:
    model, batch = small_model(family, feed_forward_proj=activation), Rectangle()
    loss, expected = gradients(model, batch, saved, None)
    ours, compiled = gradients(model, batch, saved, compile_parts(backend))
    assert ours == pytest.approx(loss, rel=1e-6) and compiled.keys() == expected.keys()
    assert max(relative_error(compiled[name], expected[name]) for name in expected) < 1e-5
    reference = T5Reference(model.config)
    reference.load_state_dict(model.state_dict())
    reference(batch.input_ids, batch.mask, batch.labels).backward()
    for name, weight in reference.named_parameters():
        assert relative_error(compiled[name], weight.grad) < 1e-5, name


def test_recomputed_blocks_drop_what_they_dropped() -> None:
    model, batch = small_model("t5-v1.1"), Rectangle()
    loss, expected = gradients(model, batch, 99, BlockParts(), rate=0.3)
    for saved, backend in ((0, "aot_eager"), (2, "eager")):
        ours, grads = gradients(model, batch, saved, compile_parts(backend), rate=0.3)
        assert ours == pytest.approx(loss, rel=1e-6)
        assert max(relative_error(grads[name], expected[name]) for name in expected) < 1e-5
    assert gradients(model, batch, 0, None)[0] != pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_share_of_the_elements_is_dropped(rate: float) -> None:
    rows = side_by_side((64,) * 8, torch.arange(8) * 7919)
    block = small_model().decoder.blocks[1]
    keys = place_dropout_keys(rows, [block.site], block.is_decoder, torch.device("cpu"))[0]
    masks = [dropped(torch.ones(2048, 256), keys, number, rate) > 0 for number in range(4)]
    for mask in masks:
        assert abs(1 - rate - mask.float().mean()) < 0.003
        for dim in (0, 1):  # As far from the mean as independent draws would be.
            deviation = (mask.float().mean(dim) - 1 + rate).std() * (mask.shape[dim] / rate / (1 - rate)) ** 0.5
            assert 0.8 < deviation < 1.2
        for shift in (1, 256):
            shifted = mask.flatten().roll(shift).view_as(mask)
            both = (mask & shifted).float().mean()
            assert abs(both - (1 - rate) ** 2) < 0.004
    together = (masks[0] & masks[1]).float().mean()
    assert abs(together - (1 - rate) ** 2) < 0.004


def test_steps_of_any_length_run_the_same_graphs() -> None:
    rate = 0.1
    model, parts = small_model(), compile_parts("eager")
    gradients(model, Rectangle(4, 17, 9), 2, parts, rate)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, source, target in ((4, 90, 9), (7, 30, 60), (5, 4, 3)):
            gradients(model, Rectangle(rows, source, target), 2, parts, rate)


@pytest.mark.parametrize(("family", "rate"), [("t5", 0.1), ("t5-v1.1", 0.0)])
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
        for given in (x, bias, keys, encoder_output, *model.parameters()):
            saved.pop(0 if given is None else given.untyped_storage().data_ptr(), None)
        block = PlannedBlock(model.config, name, 4, 4, tokens, lengths, dropout=rate > 0, scores=2**26, compiled=True)
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
