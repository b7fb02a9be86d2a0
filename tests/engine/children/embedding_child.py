"""One process of test_embedding.py: a step in which process 1 fails before its vectors are there, and a second try."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from data.batches.collate import collate_texts
from devices.cpu import CpuDevice
from engine.all_reduce import Reducer
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import Done, Engine, OutOfMemory
from memory.estimate.workload import ExecutionPlan
from tests.engine.embedding_rows import KINDS, ROWS, embedding_model, objective_of, one_pass
from tests.engine.small_models import blockwise_of

SHARES = ([0, 3], [1, 2, 4, 5])


def sums_over(*numbers: float) -> list[float]:
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def main(kind: str) -> None:
    """Take a step over two processes, first with a failure."""
    rows = KINDS[kind]()
    model = embedding_model(True, kind)
    # Alone, before there are other processes:
    expected_loss, expected = one_pass(model, kind, rows, [list(range(ROWS))])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sums: dict[str, torch.Tensor] = {}

    class Summing(OPTIMIZERS["adafactor"]):
        def update(self, weights, step, factor=1.0) -> None:
            sums.update({self.names[id(weight)]: weight.grad.clone() for weight in weights})

    update = OptimizerInBackward(Summing(dict(model.named_parameters())), reducer=Reducer())
    objective = objective_of(model, kind)
    blockwise = blockwise_of(model, objective=objective)
    engine = Engine(
        blockwise, update, CpuDevice(), ExecutionPlan(1, 4, 1, 0, 1, "float32", "float32", 2**20), sums_over
    )
    batches = [collate_texts([rows[number]], 0) for number in SHARES[rank]]
    head = model.embedding_head
    fails = rank == 1

    def pool(hidden, row_layout):
        if fails:
            raise MemoryError
        return head.pool(hidden, row_layout)

    objective.pool = pool
    outcome = engine.step(Step(1, 1e-2), batches, ROWS)
    assert isinstance(outcome, OutOfMemory), outcome
    assert not outcome.has_changed_weights and not sums
    fails = False
    outcome = engine.step(Step(1, 1e-2), batches, ROWS)
    assert isinstance(outcome, Done), outcome
    assert abs(outcome.loss / ROWS - expected_loss) < 1e-5 * abs(expected_loss)
    for name, gradient in expected.items():
        assert torch.allclose(sums[name], gradient, rtol=1e-4, atol=1e-6), name
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
