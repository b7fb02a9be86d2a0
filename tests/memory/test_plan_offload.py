"""The plan moves checkpointed activations into the RAM beside a GPU where they do not fit on it, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memory.estimate.peaks import offloaded_bytes, predict
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.plan import plan
from settings.loading import load
from units import GIB, MIB

RATES = (("float32", 1e13), ("bfloat16", 4e13))


def machine(budget: int, host: int = 16 * GIB) -> Machine:
    return Machine(budget, 8 * GIB, 0, RATES, pads_attention=True, host_bytes=host)


def planned(budget: int, host: int = 16 * GIB, **flags: Any) -> ExecutionPlan:
    config = load(
        "train",
        {"train_file": "x", "model_preset": "t5-base", "effective_batch_size": 256, "batch_size_per_gpu": 8, **flags},
    )
    return plan(config, machine(budget, host), source_tokens=512, target_tokens=114).choice


def test_only_where_nothing_faster_fits() -> None:
    assert not planned(24 * GIB).offload_boundaries
    # 256 rows through one block at a time: the checkpointed activations of 24 blocks of 768 numbers a token in bf16 are 4 GiB
    small = planned(3 * GIB, gradient_checkpointing=True)
    assert small.offload_boundaries and small.micro_batches_per_pass == 32
    assert not planned(3 * GIB, gradient_checkpointing=True, offload_boundaries=False).offload_boundaries
    assert not planned(3 * GIB, host=0, gradient_checkpointing=True).offload_boundaries, "no RAM beside this device"
    assert not planned(3 * GIB, host=2 * GIB, gradient_checkpointing=True).offload_boundaries, "does not fit there"


def test_what_leaves_the_device_comes_to_the_host() -> None:
    config = load("train", {"train_file": "x", "model_preset": "t5-base"}).model
    work, here = Workload(config, 256, 512, 114, False, "adafactor"), machine(24 * GIB)
    stay = ExecutionPlan(8, 32, 1, 0, 8, "bfloat16", "bfloat16", 32 * MIB)
    move = ExecutionPlan(8, 32, 1, 0, 8, "bfloat16", "bfloat16", 32 * MIB, offload_boundaries=True)
    stay, move = (replace(choice, source_sizes=(4096,), target_sizes=(912,)) for choice in (stay, move))
    parts = [predict(work, choice, here)["loss"]["checkpointed activations"] for choice in (stay, move)]
    of_blocks = 256 * (512 + 114) * 768 * 2
    assert parts[0] - parts[1] == pytest.approx(10 * of_blocks, rel=1e-6), "of each stack all but two"
    assert offloaded_bytes(work, stay, here) == 0
    # 12 blocks and a norm of 512 tokens, 12 blocks of 114 tokens; slabs leave little over
    assert 12 * of_blocks < offloaded_bytes(work, move, here) < 1.2 * 13 * of_blocks
