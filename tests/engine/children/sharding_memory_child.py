"""One process of test_sharding.py's measurement: the peak of three steps, beyond what the process held before its model."""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from devices.malloc import tune_malloc
from engine.all_reduce import Reducer
from engine.blockwise import Blockwise
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.sharding import ShardedWeightStore, Shards
from engine.weights import weight_store_for
from model.loss import LossSettings
from model.t5 import T5
from settings.declared import T5ModelConfig
from tests.engine.small_models import Rectangle, small_model

DEEP = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 14, "num_decoder_layers": 14, "vocab_size": 512}


def resident(field: str) -> int:
    """A figure of this process in bytes; VmHWM is the peak since it was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main(how: str, optimizer_name: str, answer: str) -> None:
    """Train, and let process 0 write the peak."""
    tune_malloc("small")
    dist.init_process_group("gloo")
    shape = small_model().config
    train(T5(shape, "meta"), how, optimizer_name)  # what libraries allocate once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    train(T5(T5ModelConfig(**{**dataclasses.asdict(shape), **DEEP}), "meta"), how, optimizer_name)
    if dist.get_rank() == 0:
        Path(answer).write_text(str(resident("VmHWM") - before))
    dist.destroy_process_group()


def train(model: T5, how: str, optimizer_name: str) -> None:
    """Three steps of a model of this shape."""
    rank, count = dist.get_rank(), dist.get_world_size()
    shards = Shards(rank, count) if how == "sharded" else None
    if shards is None:
        model = T5(model.config).initialise(1)
    else:
        model.initialise(1, shards.cut(model, "cpu"))
    optimizer = OPTIMIZERS[optimizer_name](dict(model.named_parameters()), shards=shards)
    weight_store = (
        weight_store_for(torch.float32, torch.float32) if shards is None else ShardedWeightStore(torch.float32, shards)
    )
    update = OptimizerInBackward(optimizer, weight_store=weight_store, reducer=Reducer(shards))
    blockwise = Blockwise(model, 0, weight_store, LossSettings(), 0.0)
    for number in range(1, 4):
        update.begin(Step(number, 1e-3))
        batch = Rectangle(rows=count)
        blockwise.gradients(batch.micro_batches(model, [[rank]]), batch.num_labels, update)
        update.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
