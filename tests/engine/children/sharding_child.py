"""One process of test_sharding.py: several steps over sharded weights, beside the same steps over whole ones."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from engine.all_reduce import Reducer
from engine.blockwise import Blockwise
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.sharding import ShardedWeightStore, Shards
from engine.weights import weight_store_for
from model.loss import LossSettings
from model.t5 import T5
from tests.engine.small_models import FAMILIES, Rectangle, small_model

STEPS = 4
TOLERANCE = {
    "float32": 2e-5,
    "bfloat16": 4e-3,
}  # of weights; bf16 has 8 bits, and another order of sums may round elsewhere


def train(model: T5, weight_store, shards: Shards | None, optimizer_name: str, saved: int) -> list[float]:
    """Losses of a few steps; rows 0-4 over the processes, unevenly."""
    rank, count = dist.get_rank(), dist.get_world_size()
    optimizer = OPTIMIZERS[optimizer_name](dict(model.named_parameters()), shards=shards)
    reducer = Reducer(shards) if shards else None
    update = OptimizerInBackward(optimizer, weight_store=weight_store, reducer=reducer)
    blockwise = Blockwise(model, saved, weight_store, LossSettings(), 0.1)
    losses = []
    for number in range(1, STEPS + 1):
        batch = Rectangle(rows=5, seed=number)
        mine = list(range(5))[rank::count] if shards else list(range(5))
        update.begin(Step(number, 1e-2, weight_decay=0.1, seed=7))
        total = blockwise.gradients(batch.micro_batches(model, [[row] for row in mine]), batch.num_labels, update)
        update.finish()
        if shards:
            dist.all_reduce(total)
        losses.append(float(total) / batch.num_labels)
        assert all(weight.grad is None for weight in model.parameters())
    evaluation = blockwise.loss(batch.micro_batches(model, [[0, 1]]))
    return [*losses, float(evaluation)]


def main(family: str, dtype: str, optimizer: str, saved: str) -> None:
    """Compare losses and weights."""
    dist.init_process_group("gloo")
    storage, shape = getattr(torch, dtype), small_model(family).config
    whole = T5(shape, dtype=storage).initialise(3)
    expected = train(whole, weight_store_for(storage, torch.float32), None, optimizer, int(saved))
    shards = Shards(dist.get_rank(), dist.get_world_size())
    model = T5(shape, "meta", storage)
    model.initialise(3, shards.cut(model, "cpu"))
    ours = train(model, ShardedWeightStore(torch.float32, shards), shards, optimizer, int(saved))
    tolerance = TOLERANCE[dtype]
    for ours_one, expected_one in zip(ours, expected, strict=True):
        assert abs(ours_one / expected_one - 1) < tolerance, (ours, expected)
    held = sum(weight.numel() for weight in model.parameters())
    assert held < 1.2 * sum(weight.numel() for weight in whole.parameters()) / dist.get_world_size(), "weights are cut"
    different = total = 0
    for (name, weight), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
        full = shards.gather_rows(weight.data, shards.part(weight)) if shards.is_sharded(weight) else weight.data
        error = float((full.float() - reference.float()).norm() / reference.float().norm().clamp(min=1e-9))
        assert error < tolerance, (name, error)
        different, total = different + int((full != reference).sum()), total + full.numel()
    if dtype == "bfloat16":  # other draws would differ in every second weight
        assert different < 0.02 * total, (different, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    assert sys.argv[1] in FAMILIES
    main(*sys.argv[1:])
