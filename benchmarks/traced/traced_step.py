"""The engine's own step on a GPU's meta tensors, counted by `tracing`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.traced.tracing import Tracer
from data.batches.collate import Batch, Row, collate
from devices.base import CUDA, MPS, Device, override_traits
from devices.cpu import CpuDevice
from devices.sizes import DEVICE_LOSS_CHUNK_BYTES, DEVICE_SCORES
from engine.all_reduce import Reducer
from engine.blockwise import Blockwise
from engine.loss_scaling import LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import Done, Engine
from engine.weights import weight_store_for
from memory.estimate.peaks import predict
from memory.estimate.shapes import Shapes
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from model.lora.adapter import add_adapters
from model.lora.form import LoraSettings
from model.loss import LossSettings
from model.t5 import T5
from settings.declared import T5ModelConfig


@dataclass(frozen=True)
class TracedWork:
    """One step on one kind of GPU.

    Args:
        device: "cuda" or "mps". lengths: (source, target) tokens of each row.
        saved: blocks that are saved; None: all. micro_batch: rows of one; None: all. dtype: of products, and of weights
            but with float16, where they are bfloat16.
        scores: see `devices.base`. processes: that train together; here only what the first of them does.
        max_grad_norm: of clipping; 0: off. lora_rank: of adapters over frozen weights; 0: none.
    """

    model: T5ModelConfig
    device: str
    lengths: tuple[tuple[int, int], ...]
    dropout: float = 0.0
    saved: int | None = None
    micro_batch: int | None = None
    dtype: str = "bfloat16"
    chunk_bytes: int = DEVICE_LOSS_CHUNK_BYTES
    scores: int = DEVICE_SCORES
    optimizer: str = "adafactor"
    processes: int = 1
    max_grad_norm: float = 0.0
    lora_rank: int = 0

    @property
    def shapes(self) -> Shapes:
        """For the plan."""
        sources, targets = zip(*self.lengths, strict=True)
        return Shapes(np.array([sources]), np.array([targets]))

    @property
    def storage(self) -> str:
        """The dtype of the weights."""
        return "bfloat16" if self.dtype == "float16" else self.dtype

    @property
    def num_blocks(self) -> int:
        """Of both stacks."""
        return self.model.num_layers + self.model.num_decoder_layers

    @property
    def choice(self) -> ExecutionPlan:
        """The way to run it, as a plan would say it."""
        rows = self.micro_batch or len(self.lengths)
        saved = self.num_blocks if self.saved is None else self.saved
        sizes = self.shapes.sizes(rows)
        return ExecutionPlan(
            rows,
            -(-len(self.lengths) // rows),
            1,
            saved,
            rows,
            self.storage,
            self.dtype,
            self.chunk_bytes,
            source_sizes=sizes[0],
            target_sizes=sizes[1],
            scores=self.scores,
        )


class MetaDevice(CpuDevice):
    """Holds the shapes of tensors, and stands for a GPU."""

    def __init__(self, kind: str) -> None:
        Device.__init__(self, torch.device("meta"))
        self.name, self.is_separate_memory = kind, kind == "cuda"


@contextmanager
def standing_for(work: TracedWork) -> Iterator[None]:
    """Until the context ends, tensors on meta take the way of the work's device."""
    kind = {"cuda": CUDA, "mps": MPS}[work.device]
    with override_traits("meta", kind.with_score_elements(work.scores)):
        yield


@contextmanager
def standing_for_processes(work: TracedWork) -> Iterator[None]:
    """Until the context ends, collectives are answered without any other process."""
    if work.processes == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=work.processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def engine_of(work: TracedWork, device: Device | None = None) -> Engine:
    """The engine that the plan's choice gives, filled on a device; None: its weights are on meta, and nothing fills
    them.
    """
    choice, storage, dtype = work.choice, getattr(torch, work.storage), getattr(torch, work.dtype)
    model = T5(work.model, "meta" if device is None else device.torch_device, storage)
    if device is not None:
        model.initialise(0)
    if work.lora_rank:
        add_adapters(model, LoraSettings(work.lora_rank, work.lora_rank))
    store = weight_store_for(storage, dtype)
    scaling = LossScaling() if dtype == torch.float16 else None
    blockwise = Blockwise(
        model, choice.saved_blocks, store, LossSettings(choice.loss_chunk_bytes), work.dropout, scaling=scaling
    )
    optimizer = OPTIMIZERS[work.optimizer](
        {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    )
    reducer = Reducer() if work.processes > 1 else None
    update = OptimizerInBackward(optimizer, work.max_grad_norm, scaling, store, reducer)
    return Engine(blockwise, update, device or MetaDevice(work.device), choice)


def batches_of(work: TracedWork) -> list[Batch]:
    """Rows of random tokens, in micro-batches."""
    draw = np.random.default_rng(0)
    size = work.choice.batch_size_per_gpu

    def tokens(count: int) -> NDArray[np.int64]:
        return draw.integers(3, work.model.vocab_size, count)

    rows = [Row(tokens(source), tokens(target), index) for index, (source, target) in enumerate(work.lengths)]
    return [collate(rows[start : start + size], work.model.pad_token_id) for start in range(0, len(rows), size)]


def trace(work: TracedWork, steps: int = 2, keeps_calls: bool = False) -> Tracer:
    """Run steps and give what the last one was made of: the first makes the optimizer's state."""
    tracer = Tracer(work.device == "mps")
    with standing_for(work), standing_for_processes(work), tracer:
        engine, batches = engine_of(work), batches_of(work)
        labels = sum(batch.num_labels for batch in batches)
        for number in range(1, steps + 1):
            tracer.restart()
            tracer.keeps_calls = keeps_calls and number == steps
            outcome = engine.step(Step(number, 1e-3, seed=1), batches, labels)
            assert isinstance(outcome, Done), outcome
    return tracer


def lengths_between(count: int, low: int, high: int) -> tuple[tuple[int, int], ...]:
    """Rows of random lengths; the target is a quarter of the source."""
    drawn = np.random.default_rng(7).integers(low, high + 1, count)
    return tuple((int(n), max(1, int(n) // 4)) for n in drawn)


def planned_bytes(work: TracedWork, libraries_bytes: int = 0) -> int:
    """What the plan says that the step takes at most, without what allocators hold beside tensors.

    Args:
        libraries_bytes: of the workspaces that torch counts among its tensors on a real GPU, and that a trace has none
            of.
    """
    rates = (("float32", 4e14), ("bfloat16", 7e14))
    machine = Machine(
        1 << 40,
        1 << 40,
        0,
        rates,
        pads_attention=True,
        fuses_attention=work.device == "cuda",
        widens_whole=True,
    )
    sources, targets = zip(*work.lengths, strict=True)
    asked = Workload(
        work.model,
        len(work.lengths),
        max(sources),
        max(targets),
        work.dropout > 0,
        work.optimizer,
        shapes=work.shapes,
        hold_gradients=work.max_grad_norm > 0,
    )
    phases = predict(asked, work.choice, machine)
    apart = ("libraries", "allocator slack")
    return libraries_bytes + max(
        sum(size for name, size in parts.items() if name not in apart)
        for phase, parts in phases.items()
        if phase not in ("load", "evaluation", "samples", "save")
    )
