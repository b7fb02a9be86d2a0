"""One process of test_sharded_saving.py: a sharded run writes a checkpoint, and reads its rows of it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from data.tokenizers.training import byte_tokenizer
from engine.optimizers import OPTIMIZERS, Step
from engine.sharding import Shards
from model.t5 import T5
from tests.engine.small_models import small_model
from training.checkpoints.content import load_optimizer, save_sharded, write_companions
from training.checkpoints.folder import Checkpoints
from training.checkpoints.state import TrainingState


def main(run_dir: Path) -> None:
    dist.init_process_group("gloo")
    shards = Shards(dist.get_rank(), dist.get_world_size())
    shape = small_model("t5").config
    model = T5(shape, "meta")
    model.initialise(3, shards.cut(model, "cpu"))
    for name in ("muon", "adamw_8bit", "adafactor"):
        check(run_dir if name == "adafactor" else run_dir.with_name(name), name, model, shards)
    dist.destroy_process_group()


def check(run_dir: Path, name: str, model: T5, shards: Shards) -> None:
    """Write the state of an optimizer and read it again."""
    optimizer = OPTIMIZERS[name](dict(model.named_parameters()))
    optimizer.shards = shards
    draw = torch.Generator().manual_seed(shards.rank)
    for weight in model.parameters():
        own = torch.randn(weight.shape, generator=draw) if shards.is_sharded(weight) else torch.ones(weight.shape)
        weight.grad = own
        optimizer.update([weight], Step(1, 0.0))
        weight.grad = None
    checkpoints = Checkpoints(run_dir, 2)
    companions = partial(write_companions, tokenizer=byte_tokenizer(), state=TrainingState(step=1))
    save_sharded(checkpoints, 1, model, optimizer, shards, companions)
    folder = checkpoints.latest()
    assert folder is not None
    again = OPTIMIZERS[name](dict(model.named_parameters()))
    again.shards = shards
    assert optimizer.state
    load_optimizer(folder, again, torch.device("cpu"), shards)
    for key, tensor in optimizer.state.items():
        assert torch.equal(again.state[key], tensor), key


if __name__ == "__main__":
    main(Path(sys.argv[1]))
