"""One process of test_sharding.py: steps over sharded weights on a GPU's way, gathered a block ahead and not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from devices.base import CUDA, override_traits
from engine.sharding import ShardedWeightStore, Shards
from model.t5 import T5
from tests.engine.children.sharding_child import train
from tests.engine.small_models import small_model


def run(is_ahead: bool, saved: int) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, weights held here, and gathers that were begun early."""
    shards, begun = Shards(dist.get_rank(), dist.get_world_size()), []
    model = T5(small_model().config, "meta")
    model.initialise(3, shards.cut(model, "cpu"))
    store = ShardedWeightStore(torch.float32, shards)
    begin = store.expect

    def expect(weights: Sequence[nn.Parameter], upcoming: Iterable[Sequence[nn.Parameter]]) -> None:
        if is_ahead:
            begin(weights, upcoming)
            begun.extend(store._coming)

    with mock.patch.object(store, "expect", expect):
        losses = train(model, store, shards, "adafactor", saved)
    assert not store._coming, "each was waited for"
    return losses, [weight.detach().clone() for weight in model.parameters()], len(begun)


def main() -> None:
    """The same bits, and all blocks but the first of each way are gathered ahead."""
    dist.init_process_group("gloo")
    with override_traits("cpu", CUDA):
        for saved in (0, 99):
            losses, weights, begun = run(True, saved)
            expected, reference, none = run(False, saved)
            assert losses == expected and all(map(torch.equal, weights, reference))
            # 2 encoder and 3 decoder blocks of 6 and 10 matrices: forward and back all but the first, 4 steps and an evaluation
            assert begun == 4 * (6 + 20 + 6 * 2 + 10 * 3) + 6 + 20 and none == 0, begun
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
