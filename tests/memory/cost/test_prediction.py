"""The formulas know the engine: the tensors that a step really makes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from config import T5ModelConfig
from engine.checkpointing import Checkpointing
from engine.micro_batches import MicroBatch
from engine.optimizers import OPTIMIZERS, Step
from engine.update import Update
from engine.walk import Walk
from engine.weights import weight_store_for
from memory.cost.prediction import Choice, Machine, Work, changeable, peak_of, predict
from memory.cost.shapes import Shapes
from model.loss import LossSettings
from model.rows import Rows
from model.t5 import T5
from units import GIB, MIB

SHAPE = {
    "vocab_size": 2048,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 512,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
ROWS, SOURCE, TARGET = 4, 192, 64


def live_bytes(shape: T5ModelConfig, choice: Choice) -> int:
    """The most that the tensors of a second step take, as torch's own allocator counts them."""
    t5 = T5(shape).initialise(0)
    walk = Walk(
        t5, Checkpointing(choice.saved_blocks), weight_store_for(torch.float32, torch.float32), LossSettings(choice.loss_chunk_bytes),
        shape.dropout_rate,
    )  # fmt: skip
    update = Update(OPTIMIZERS["adafactor"](dict(t5.named_parameters())))
    keys = torch.arange(choice.batch_size_per_gpu)

    def step(number: int) -> None:
        micro_batches = []
        for _ in range(choice.micro_batches_per_pass):
            n, m = choice.batch_size_per_gpu * SOURCE, choice.batch_size_per_gpu * TARGET
            source, target = (Rows((length,) * choice.batch_size_per_gpu, keys) for length in (SOURCE, TARGET))
            micro_batches.append(
                MicroBatch(torch.ones(n).long(), torch.ones(m).long(), torch.ones(m).long(), source, target)
            )
        update.begin(Step(number, 1e-3))
        walk.gradients(micro_batches, 10, update.ready)
        update.finish()

    step(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step(2)
    now = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("batch_size", "saved", "flags"),
    [
        (4, 5, {}), (4, 0, {}), (1, 0, {}), (2, 3, {}), (4, 0, {"dropout_rate": 0.1}), (4, 5, {"dropout_rate": 0.1}),
        (4, 0, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}), (2, 0, {"bias_in_every_layer": True}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # of the profiler
def test_a_step_makes_the_tensors_that_are_predicted(
    batch_size: int, saved: int, flags: dict[str, Any], compiled: bool
) -> None:
    shape = T5ModelConfig(**{**SHAPE, **flags})
    choice = Choice(batch_size, ROWS // batch_size, 1, saved, 1, "float32", "float32", MIB, "small", kernels=compiled)
    work = Work(
        shape,
        ROWS,
        SOURCE,
        TARGET,
        shape.dropout_rate > 0,
        "adafactor",
        evaluation=Shapes.longest(1, 8, 8),
        sample_rows=0,
    )
    phases = predict(work, choice, Machine(GIB, GIB, libraries_bytes=0))
    of_steps = {
        name: parts
        for name, parts in phases.items()
        if name in ("loss", "decoder backward", "encoder backward", "block update", "last update")
    }
    parts = of_steps[peak_of(of_steps)[0]]
    predicted = changeable(parts) - parts["allocator slack"]
    measured = live_bytes(shape, choice)
    assert -0.03 * measured <= predicted - measured <= 0.12 * measured


@pytest.mark.parametrize("pads", [False, True], ids=["no padding", "padded attention"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_more_tokens_never_take_less(pads: bool, compute: str) -> None:
    machine = Machine(GIB, GIB, 0, pads_attention=pads)
    for kept in (0, 99):
        choice = Choice(2, 1, 1, kept, 2, "float32", compute, MIB)
        shape = T5ModelConfig(**SHAPE)
        peaks = [
            {
                phase: sum(parts.values())
                for phase, parts in predict(Work(shape, 2, source, target, True, "adafactor"), choice, machine).items()
            }
            for source, target in ((32, 16), (64, 16), (64, 64), (500, 64), (500, 500), (2000, 500), (2000, 2000))
        ]
        for fewer, more in itertools.pairwise(peaks):
            assert not {phase: (size, more[phase]) for phase, size in fewer.items() if size > more[phase]}


def test_a_head_that_is_widened_in_pieces_takes_less_than_a_whole_copy() -> None:
    shape = T5ModelConfig(**{**SHAPE, "vocab_size": 60_000})
    choice = Choice(2, 1, 1, 0, 2, "bfloat16", "float32", MIB)
    work = Work(shape, 2, 64, 64, True, "adafactor")
    whole = shape.vocab_size * shape.d_model * 4
    pieces, copy = (
        sum(predict(work, choice, Machine(GIB, GIB, 0, widens_whole=widens))["loss"].values())
        for widens in (False, True)
    )
    assert 0.5 * whole < copy - pieces <= whole
