"""Checkpointed activations that waited on the host give the same gradients, bit for bit, and only a few are on the device at once."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from devices.copies import HostCopies, Pool
from engine.activation_offload import ActivationOffload
from engine.blockwise import Blockwise
from engine.gradient_checkpointing import CheckpointedBlock
from engine.weights import WeightStore
from model.loss import LossSettings
from model.t5 import T5
from tests.engine.small_models import Collected, Rectangle, small_model

CPU = torch.device("cpu")
CUTS = [[0, 3], [1], [2]]


def held_bytes(pool: Pool) -> int:
    return sum(slab.numel() for slab in pool.slabs)


def gradients(model: T5, saved: int, offload: ActivationOffload | None, rate: float = 0.2) -> list[torch.Tensor]:
    batch = Rectangle()
    blockwise = Blockwise(model, saved, WeightStore(torch.float32), LossSettings(), rate, activation_offload=offload)
    total = blockwise.gradients(batch.micro_batches(model, CUTS), batch.num_labels)
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    for weight in model.parameters():
        weight.grad = None
    return [total, *found]


@pytest.mark.parametrize(("family", "saved"), [("t5", 0), ("t5-v1.1", 2), ("umt5", 99)])
def test_gradients_are_the_same_bit_for_bit(family: str, saved: int) -> None:
    model = small_model(family)
    offload = ActivationOffload(HostCopies(CPU))
    here, away = gradients(model, saved, None), gradients(model, saved, offload)
    again = gradients(model, saved, offload)
    assert len(here) == len(away) == len(again)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(here, away, again, strict=True))


class Counting(HostCopies):
    """Remembers what was copied, and how many tensors were on the device while the pass stood at each block."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.parked = self.fetched = 0
        self.there: list[int] = []

    def park(self, tensor):
        self.parked += 1
        return super().park(tensor)

    def begin_fetch(self, parked) -> None:
        self.fetched += parked.device is None
        super().begin_fetch(parked)


def test_only_a_few_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 4
    model, copies, alive = small_model(num_layers=layers, num_decoder_layers=layers), Counting(), []
    passes: weakref.WeakSet[CheckpointedBlock] = weakref.WeakSet()
    forward, backward = CheckpointedBlock.forward, CheckpointedBlock.backward

    def counted(block: CheckpointedBlock) -> int:
        passes.add(block)
        return sum(other.x is not None or other.entry is not None for other in passes)

    monkeypatch.setattr(CheckpointedBlock, "forward", lambda block: (alive.append(counted(block)), forward(block))[1])
    monkeypatch.setattr(
        CheckpointedBlock,
        "backward",
        lambda block, grad: (alive.append(counted(block)), backward(block, grad))[1],
    )
    gradients(model, 0, ActivationOffload(copies), rate=0.0)
    stages, micro_batches = 2 * (layers + 1), len(CUTS)
    assert copies.parked == copies.fetched == (stages - 1) * micro_batches, "the norm after the last block is saved"
    assert max(alive) <= 2 * micro_batches, alive
    alive.clear()
    gradients(model, 0, None, rate=0.0)
    assert max(alive) == stages * micro_batches, "without it, all are held"


def test_a_step_broken_off_leaves_nothing_behind() -> None:
    model, offload = small_model(), ActivationOffload(HostCopies(CPU))
    expected = gradients(model, 0, None)

    class Break(Exception):
        pass

    class Breaking(Collected):
        def apply(self, weights: object) -> None:
            raise Break

    batch = Rectangle()
    blockwise = Blockwise(model, 0, WeightStore(torch.float32), LossSettings(), 0.2, activation_offload=offload)
    with pytest.raises(Break):
        blockwise.gradients(batch.micro_batches(model, CUTS), batch.num_labels, Breaking())
    model.zero_grad()
    held = held_bytes(offload.copies.pool)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, 0, offload), expected, strict=True))
    assert held_bytes(offload.copies.pool) == held


@pytest.mark.cuda
def test_on_a_gpu_bit_for_bit_and_in_less_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    from devices.copies import CudaCopies

    device = torch.device("cuda")
    model = small_model(d_model=512, num_layers=12, num_decoder_layers=12).to(device)
    batch = Rectangle(rows=4, source=512, target=512)
    peaks, found = [], []
    for offload in (None, ActivationOffload(CudaCopies(device)), ActivationOffload(CudaCopies(device))):
        blockwise = Blockwise(model, 0, WeightStore(torch.float32), LossSettings(), 0.0, activation_offload=offload)
        micro_batches = [
            replace(
                part,
                input_ids=part.input_ids.to(device),
                decoder_ids=part.decoder_ids.to(device),
                labels=part.labels.to(device),
            )
            for part in batch.micro_batches(model.cpu(), [[0], [1], [2], [3]])
        ]
        model.to(device)
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()
        blockwise.gradients(micro_batches, batch.num_labels)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - begin)
        found.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
        model.zero_grad()
    tokens = batch.source_lengths.sum() + batch.target_lengths.sum()
    activation_bytes = int(tokens) * 512 * 4 * 12  # of twelve blocks; a device holds those of three
    assert peaks[1] < peaks[0] - 0.6 * activation_bytes, (peaks, activation_bytes)
    worst = max(
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-20)) for a, b in zip(found[0], found[1], strict=True)
    )
    assert worst < 1e-4, "sums by atomics differ in the last bits on a GPU"
