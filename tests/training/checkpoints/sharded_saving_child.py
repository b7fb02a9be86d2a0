"""One process of test_sharded_saving.py: a sharded run writes a checkpoint; `full` lets the disk of the last one be full."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from data.tokenizers.training import byte_tokenizer
from engine.optimizers import OPTIMIZERS, Step
from engine.optimizers.rounding import ROUNDINGS
from engine.sharing.sharding import Shards
from model.t5 import T5
from settings.errors import UserError
from tests.engine.small_models import small_model
from training.checkpoints import sharded_state
from training.checkpoints.folder import Checkpoints
from training.checkpoints.sharded_state import load_optimizer_share, save_sharded
from training.checkpoints.state import TrainingState


def main(run_dir: Path, how: str) -> None:
    dist.init_process_group("gloo")
    shards = Shards(dist.get_rank(), dist.get_world_size())
    shape = small_model("t5").config
    model = T5(shape, "meta")
    model.initialise(3, shards.cut(model, "cpu"))
    for name in ("muon", "adamw_8bit", "adafactor"):
        check(run_dir if name == "adafactor" else run_dir.with_name(name), name, model, shards, how)
    dist.destroy_process_group()


def check(run_dir: Path, name: str, model: T5, shards: Shards, how: str) -> None:
    """Write the state of an optimizer and read it again."""
    optimizer = OPTIMIZERS[name](dict(model.named_parameters()), ROUNDINGS["stochastic"]())
    optimizer.shards = shards
    draw = torch.Generator().manual_seed(shards.rank)
    for weight in model.parameters():
        own = torch.randn(weight.shape, generator=draw) if shards.is_sharded(weight) else torch.ones(weight.shape)
        weight.grad = own
        optimizer.update(weight, Step(1, 0.0))
        weight.grad = None
    checkpoints = Checkpoints(run_dir, 2, is_main=shards.rank == 0)

    def save(step: int) -> Path:
        return save_sharded(checkpoints, model, byte_tokenizer(), optimizer, TrainingState(step=step), shards)

    folder = save(1)
    again = OPTIMIZERS[name](dict(model.named_parameters()), ROUNDINGS["stochastic"]())
    again.shards = shards
    assert optimizer.state
    load_optimizer_share(folder, again, torch.device("cpu"), shards)
    for key, tensor in optimizer.state.items():
        assert torch.equal(again.state[key], tensor), key
    if how == "full" and name == "adafactor":
        full = mock.patch.object(sharded_state, "write_rows", side_effect=OSError(28, "No space left on device"))
        with full if shards.rank == shards.num_processes - 1 else mock.patch("time.sleep"):
            try:
                save(2)
            except UserError as error:
                assert "No space left on device" in str(error), error
                assert "the checkpoint of step 1 is whole" in str(error), error
            else:
                raise AssertionError("a checkpoint without the rows of a process was written")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
