"""What passes between blocks may be narrower than the products: half the bytes, rounded as bf16 products round."""

from __future__ import annotations

import weakref

import torch

from devices.malloc import HeapTrimmer
from engine.blockwise import Blockwise, CheckpointedBlock
from engine.weights import weight_store_for
from model.loss import LossSettings
from tests.engine.small_models import Rectangle, small_model

CUTS = [[0, 3], [1], [2]]


def gradients(
    family: str, saved: int, between_blocks: torch.dtype, rate: float = 0.0, compute: torch.dtype = torch.float32
) -> tuple[float, torch.Tensor]:
    """Loss and all gradients in one vector, of weights that rest in bf16."""
    model, batch = small_model(family).bfloat16(), Rectangle()
    blockwise = Blockwise(
        model,
        saved,
        weight_store_for(torch.bfloat16, compute),
        LossSettings(),
        rate,
        between_blocks_dtype=between_blocks,
    )
    total = blockwise.gradients(batch.micro_batches(model, CUTS), batch.num_labels)
    return float(total), torch.cat([w.grad.flatten().float() for w in model.parameters() if w.grad is not None])


def test_a_saved_block_does_not_hold_its_output() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def doubled(x: torch.Tensor, *, graph_only: bool = False) -> torch.Tensor:
        made.append(weakref.ref(y := 2.0 * x))
        return y

    block = CheckpointedBlock(
        doubled, torch.ones(3), is_saved=True, dtype=torch.float32, needs_input=True, heap=HeapTrimmer("small")
    )
    block.forward()
    assert made[0]() is None
    grad = block.backward(torch.full((3,), 5.0))
    assert grad is not None and grad.tolist() == [10.0] * 3


def test_kept_and_recomputed_blocks_agree() -> None:
    (one, recomputed), (other, whole) = (gradients("t5", blocks, torch.bfloat16, 0.2) for blocks in (0, 2))
    assert one == other
    torch.testing.assert_close(recomputed, whole, rtol=1e-5, atol=1e-7)
