"""The number of threads changes no number: it may follow what other programs leave of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from data.batches.collate import Batch
from devices.cpu import CpuDevice
from devices.kernels.calls import use
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import Engine, to_micro_batch
from memory.estimate.workload import ExecutionPlan
from model.decoding.decoder import Decoder
from tests.engine.small_models import blockwise_of, small_model

ROWS = 6
SOURCE = 40
TARGET = 20
VOCABULARY = 300
# Matrices of 65,536 numbers: torch divides sums among threads from 32,768 on.
WIDE = {"vocab_size": VOCABULARY, "d_model": 128, "d_kv": 16, "d_ff": 512, "num_layers": 1, "num_decoder_layers": 1}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    use(True)


def batch(seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    inputs = draw.integers(2, VOCABULARY, (ROWS, SOURCE))
    labels = draw.integers(2, VOCABULARY, (ROWS, TARGET))
    sources = draw.integers(SOURCE // 2, SOURCE, ROWS)
    targets = draw.integers(TARGET // 2, TARGET, ROWS)
    return Batch(inputs, sources, labels, targets, draw.integers(0, 99, ROWS))


def numbers_with(threads: int, optimizer: str, max_grad_norm: float) -> list[torch.Tensor]:
    """Losses of two steps and of an evaluation, all weights after them, and the scores of a first token."""
    torch.set_num_threads(threads)
    model = small_model(**WIDE)
    update = OptimizerInBackward(OPTIMIZERS[optimizer](dict(model.named_parameters())), max_grad_norm)
    blockwise = blockwise_of(model, 1, rate=0.1)
    engine = Engine(blockwise, update, CpuDevice(), ExecutionPlan(ROWS, 2, 1, 1, 2, "float32", "float32", 2**20))
    losses = [
        engine.step(Step(number, 1e-2), [batch(number), batch(number + 9)], 2 * ROWS * TARGET).loss for number in (1, 2)
    ]
    evaluated = blockwise.loss([to_micro_batch(batch(5), engine.model.config, engine.device.torch_device)])
    decoder = Decoder(model)
    decoder.join([list(range(5, 25)), [9, 1]], limit=3)
    return [torch.tensor(losses), evaluated, *model.state_dict().values(), decoder.step([0, 0])]


@pytest.mark.parametrize(("optimizer", "has_kernels"), [("muon", False), ("adafactor", True)])
def test_losses_and_weights_are_the_same_bits_with_any_number_of_threads(optimizer: str, has_kernels: bool) -> None:
    use(has_kernels)
    max_grad_norm = 1.0 if has_kernels else 0.0
    one, two = (numbers_with(threads, optimizer, max_grad_norm) for threads in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
