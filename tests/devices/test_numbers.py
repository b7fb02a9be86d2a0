"""A device computes what the CPU computes with plain fp32 products: `pytest -m cuda`, or `-m mps` on a Mac.

The CPU itself, with its compiled kernels, is a device here too (`-m slow`), so that all of this runs everywhere.
Tolerances are those of another order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.batches.collate import Batch, Row, collate
from devices.base import Device
from devices.kernels.calls import use
from engine.blockwise import Blockwise
from engine.loss_scaling import LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import to_micro_batch
from engine.weights import weight_store_for
from model.loss import LossSettings
from model.t5 import T5
from settings.declared import T5ModelConfig

CPU = torch.device("cpu")
FP32 = torch.float32
SMOOTH = T5ModelConfig(
    vocab_size=512,
    d_model=256,
    d_kv=32,
    d_ff=1024,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=8,
    feed_forward_proj="gated-gelu",
)
RELU = replace(SMOOTH, feed_forward_proj="relu")
UMT5 = replace(SMOOTH, bias_in_every_layer=True, tie_word_embeddings=False, scale_decoder_outputs=False)
EQUAL = ((96, 24),) * 8
RAGGED = ((128, 3), (5, 30), (77, 11), (31, 31), (96, 1), (128, 30))
ALL_BLOCKS = 99
EXACT = 1e-4
UPDATED = 1e-3  # after four updates
NARROW = {torch.bfloat16: 2e-2, torch.float16: 1e-2}
DEEP = 1.5  # times `NARROW` for the gradients of a whole model, which a CPU in bf16 reaches too


def relative_error(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest over all tensors of the norm of the difference over the norm of what is expected."""
    errors = []
    for tensor, reference in zip(tensors, expected, strict=True):
        reference = reference.double()
        difference = tensor.cpu().double() - reference
        errors.append(float(difference.norm() / reference.norm().clamp(min=1e-30)))
    return max(errors)


def batches_of(shape: T5ModelConfig, lengths: Sequence[tuple[int, int]], count: int = 1) -> list[Batch]:
    """Rows of these lengths with random ids, dealt out to some micro-batches."""
    draw = np.random.default_rng(0)
    rows = []
    for key, (source, target) in enumerate(lengths, 1):
        rows.append(Row(draw.integers(3, shape.vocab_size, source), draw.integers(3, shape.vocab_size, target), key))
    return [collate(rows[first::count], shape.pad_token_id) for first in range(count)]


def gradients(
    model: T5,
    batches: Sequence[Batch],
    saved_blocks: int = ALL_BLOCKS,
    compute: torch.dtype = FP32,
    storage: torch.dtype = FP32,
) -> list[Tensor]:
    """The loss and the gradients of all trained weights, fp32, on the host."""
    scaling = LossScaling() if compute == torch.float16 else None
    store = weight_store_for(storage, compute, (model.embedding, model.output_weight))
    blockwise = Blockwise(model, saved_blocks, store, LossSettings(), 0.0, scaling=scaling)
    micro_batches = [to_micro_batch(batch, model.config, model.embedding.device) for batch in batches]
    loss = blockwise.gradients(micro_batches, sum(batch.num_labels for batch in batches))
    scale = 1.0 if scaling is None else scaling.scale
    return [loss.cpu(), *(w.grad.float().cpu() / scale for w in model.parameters() if w.grad is not None)]


@pytest.mark.parametrize(
    ("shape", "lengths", "saved_blocks"),
    [
        pytest.param(SMOOTH, EQUAL, ALL_BLOCKS, id="equal rows"),
        pytest.param(SMOOTH, RAGGED, 0, id="ragged rows, recomputed"),
        pytest.param(UMT5, RAGGED, ALL_BLOCKS, id="untied head, bias in every layer"),
    ],
)
def test_loss_and_gradients_are_those_of_the_cpu(
    device: Device, shape: T5ModelConfig, lengths: Sequence[tuple[int, int]], saved_blocks: int
) -> None:
    use(False)
    expected = gradients(T5(shape).initialise(0), batches_of(shape, lengths))
    use(True)
    model = T5(shape).initialise(0).to(device.torch_device)
    ours = gradients(model, batches_of(shape, lengths, 1 if saved_blocks else 2), saved_blocks)
    assert relative_error(ours, expected) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_near_those_of_fp32(device: Device, dtype: torch.dtype) -> None:
    is_host = device.torch_device == CPU
    if dtype not in device.fast_dtypes() and not (is_host and dtype == torch.bfloat16):
        pytest.skip(f"{dtype} is not fast here")
    device.set_exact_fp32(False)
    model = T5(RELU).initialise(0).bfloat16()
    use(False)
    loss, *expected = gradients(T5(RELU).initialise(0).bfloat16().float(), batches_of(RELU, RAGGED))
    use(True)
    our_loss, *ours = gradients(
        model.to(device.torch_device), batches_of(RELU, RAGGED, 2), 0, compute=dtype, storage=torch.bfloat16
    )
    together = torch.cat([gradient.flatten() for gradient in ours])
    expected_together = torch.cat([gradient.flatten() for gradient in expected])
    assert relative_error([our_loss, together], [loss, expected_together]) < DEEP * NARROW[dtype]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_updates_are_those_of_the_cpu(device: Device, name: str) -> None:
    def updated(where: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 48, generator=generator).to(where))
        optimizer = OPTIMIZERS[name]({"w": weight})
        for number in range(1, 5):
            weight.grad = torch.randn(64, 48, generator=generator).to(where)
            optimizer.update([weight], Step(number, 0.01, 0.1))
        return weight.detach().cpu()

    use(False)
    expected = updated(CPU)
    use(True)
    assert relative_error([updated(device.torch_device)], [expected]) < UPDATED


def test_steps_lie_on_the_device_and_give_the_same_bits_again(device: Device) -> None:
    def trained() -> list[Tensor]:
        model = T5(RELU, dtype=torch.bfloat16).initialise(0).to(device.torch_device)
        (batch,) = batches_of(RELU, RAGGED)
        optimizer = OPTIMIZERS["adafactor"](dict(model.named_parameters()))
        update = OptimizerInBackward(optimizer)
        store = weight_store_for(torch.bfloat16, device.fast_dtypes()[0])
        blockwise = Blockwise(model, 0, store, LossSettings(), 0.2)
        for number in range(1, 4):
            update.begin(Step(number, 0.01))
            micro_batch = to_micro_batch(batch, RELU, device.torch_device)
            update.finish(blockwise.gradients([micro_batch], batch.num_labels, update))
        device.check_placement([*model.named_parameters(), *optimizer.state.items()])
        return [weight.detach().cpu() for weight in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(trained(), trained(), strict=True))
