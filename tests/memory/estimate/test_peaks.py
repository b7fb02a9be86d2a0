"""The formulas know the engine: the tensors that a step really makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from data.batches.collate import Batch, LabelledBatch
from engine.blockwise import Blockwise
from engine.objectives.labels import LabelObjective
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import to_micro_batch
from engine.weights import weight_store_for
from memory.estimate.blocks import Adapted
from memory.estimate.peaks import changeable, peak_of, predict
from memory.estimate.shapes import Shapes
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from model.lora.adapter import add_adapters
from model.lora.form import LoraSettings
from model.loss import LossSettings
from model.micro_batch import MicroBatch
from model.shapes import targets_of
from model.t5 import T5
from settings.declared import T5ModelConfig
from support.units import GIB, MIB

SHAPE = {
    "vocab_size": 2048,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 512,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
ROWS = 4
SOURCE = 192
TARGET = 64


def micro_batch(shape: T5ModelConfig, rows: int) -> MicroBatch:
    """Rows of one length, as a CPU with or without compiled kernels lays them out."""
    source = np.ones((rows, SOURCE), np.int64)
    labels = np.ones((rows, TARGET), np.int64)
    lengths = [np.full(rows, length) for length in (SOURCE, TARGET)]
    batch = Batch(source, lengths[0], labels, lengths[1], np.arange(rows))
    if shape.num_labels:
        labels = labels[:, :1] if shape.pools_rows else source
        batch = LabelledBatch(source, lengths[0], labels, lengths[1], np.arange(rows))
    return to_micro_batch(batch, shape, torch.device("cpu"))


def live_bytes(shape: T5ModelConfig, choice: ExecutionPlan) -> int:
    """The most that the tensors of a second step take, as torch's own allocator counts them."""
    t5 = T5(shape).initialise(0)
    blockwise = Blockwise(
        t5,
        choice.saved_blocks,
        weight_store_for(torch.float32, torch.float32),
        LossSettings(choice.loss_chunk_bytes),
        shape.dropout_rate,
        None if t5.label_head is None else LabelObjective(t5.label_head, None, shape.dropout_rate),
    )
    update = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(t5.named_parameters())))
    update.holds_gradients = choice.hold_gradients

    def step(number: int) -> None:
        micro_batches = [micro_batch(shape, choice.batch_size_per_gpu) for _ in range(choice.micro_batches_per_pass)]
        update.begin(Step(number, 1e-3))
        update.finish(blockwise.gradients(micro_batches, 10, update))

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
    ("batch_size", "saved", "hold_gradients", "flags"),
    [
        (4, 5, False, {}),
        (4, 0, True, {"dropout_rate": 0.1}),
        (2, 3, False, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
        (4, 0, True, {"head": "token", "labels": "3", "num_decoder_layers": 0, "dropout_rate": 0.1}),
    ],
)
@pytest.mark.filterwarnings("ignore")  # The profiler warns.
def test_a_step_makes_the_tensors_that_are_predicted(
    batch_size: int, saved: int, hold_gradients: bool, flags: dict[str, Any], compiled: bool
) -> None:
    shape = T5ModelConfig(**{**SHAPE, **flags})
    choice = ExecutionPlan(
        batch_size,
        ROWS // batch_size,
        1,
        saved,
        1,
        "float32",
        "float32",
        MIB,
        "small",
        kernels=compiled,
        hold_gradients=hold_gradients,
    )
    work = Workload(
        shape,
        ROWS,
        SOURCE,
        TARGET if shape.is_text else SOURCE * (shape.num_decoder_layers > 0),
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


@pytest.mark.parametrize(
    ("form", "some", "most"),
    [({"dropout": 0.1}, None, 1.7), ({}, ("q", "v"), 0.9)],
    ids=["dropped inputs", "no inputs of frozen matrices"],
)
def test_what_adapters_keep_for_backward_is_counted(
    form: dict[str, Any], some: tuple[str, ...] | None, most: float, compiled: bool
) -> None:
    """Beside plain adapters on all matrices, which keep what their products keep; of dropped inputs, one stands for the
    input itself.
    """
    shape = T5ModelConfig(**SHAPE)
    targets = tuple(targets_of(shape))

    def saved_bytes(settings: LoraSettings) -> int:
        t5 = T5(shape).initialise(0)
        add_adapters(t5, settings, seed=1)
        store = weight_store_for(torch.float32, torch.float32)
        blockwise = Blockwise(t5, 5, store, LossSettings(), 0.0)
        tensors: dict[int, torch.Tensor] = {}  # They stay alive, so that no storage comes twice.
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: tensors.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
        ):
            blockwise.gradients([micro_batch(shape, ROWS)], 10)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())

    added = saved_bytes(LoraSettings(2, 4.0, some or targets, **form)) - saved_bytes(LoraSettings(2, 4.0, targets))

    def counted(targets: tuple[str, ...], drops: bool) -> int:
        work = Workload(shape, ROWS, SOURCE, TARGET, False, "adafactor", adapted=Adapted(targets, drops))
        choice = ExecutionPlan(ROWS, 1, 1, 5, 1, "float32", "float32", MIB, kernels=compiled)
        return predict(work, choice, Machine(GIB, GIB))["loss"]["saved blocks"]

    low, high = sorted((0.99 * added, most * added))
    assert low <= counted(some or targets, "dropout" in form) - counted(targets, False) <= high
