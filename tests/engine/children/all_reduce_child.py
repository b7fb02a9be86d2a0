"""One process of test_all_reduce.py: a step in which process 1 may fail, and the same step run again."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from devices.base import CUDA, HOST, override_traits
from engine.all_reduce import Reducer, StepFailed
from engine.blockwise import Blockwise, Schedule
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.weights import WeightStore
from model.loss import LossSettings
from tests.engine.small_models import Rectangle, small_model


class Broken(Exception):
    """Stands for an out-of-memory error."""


def main(failing_group: str, over: str = "") -> None:
    """Process 1 fails when this group of the pass is handed over.

    Args:
        over: "hosts": failures go over a group of their own, as on GPUs.
    """
    dist.init_process_group("gloo")
    hosts = dist.new_group(backend="gloo") if over == "hosts" else None
    rank = dist.get_rank()
    batch = Rectangle()
    model = small_model(seed=3)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = OPTIMIZERS["adafactor"](dict(model.named_parameters()))
    number = int(failing_group)
    handed: list[list[str]] = []

    class Breaking(OptimizerInBackward):
        def apply(self, weights) -> None:
            if rank == 1 and len(handed) == number:
                raise Broken
            handed.append([optimizer.names[id(weight)] for weight in weights])
            super().apply(weights)

    update = Breaking(optimizer, reducer=Reducer(hosts=hosts))
    blockwise = Blockwise(model, 99, WeightStore(torch.float32), LossSettings(), 0.0)
    rows = [[0, 1], [2, 3]][rank]
    outcome = "done"
    groups = Schedule(model).backward()
    update.begin(Step(1, 1e-2))
    try:
        update.finish(blockwise.gradients(batch.micro_batches(model, [rows]), batch.num_labels, update))
    except StepFailed:
        outcome = "stopped"
    except Broken:
        outcome = "broke"
        update.reducer.abort(groups, blockwise.zero_gradients)
    order = [[optimizer.names[id(weight)] for weight in group] for group in groups]
    assert handed == order[: len(handed)], "the order is known before the pass"
    everywhere = ["", ""]
    dist.all_gather_object(everywhere, outcome)
    assert everywhere == ["stopped", "broke"]
    if number == 0:
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    again(rank, before, hosts)


def again(rank: int, before: dict[str, torch.Tensor], hosts: dist.ProcessGroup | None) -> None:
    """The collectives are in order again: a step of both processes gives the gradients of one; with `hosts`, the way of
    a GPU.
    """
    model = small_model(seed=3)
    batch = Rectangle()
    model.load_state_dict(before)
    sums: dict[str, torch.Tensor] = {}

    class Summing(OPTIMIZERS["adafactor"]):
        def update(self, weights, step, factor=1.0) -> None:
            sums.update({self.names[id(weight)]: weight.grad.clone() for weight in weights})

    update = OptimizerInBackward(Summing(dict(model.named_parameters())), reducer=Reducer(hosts=hosts))
    blockwise = Blockwise(model, 0, WeightStore(torch.float32), LossSettings(), 0.0)
    with override_traits("cpu", replace(CUDA, has_fused_attention=False) if hosts else HOST):
        micro_batches = batch.micro_batches(model, [[[0, 1], [2, 3]][rank]])
        update.finish(blockwise.gradients(micro_batches, batch.num_labels, update))
    model(batch.input_ids, batch.mask, batch.labels).backward()
    for name, weight in model.named_parameters():
        assert torch.allclose(sums[name], weight.grad, rtol=1e-4, atol=1e-6), name
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
