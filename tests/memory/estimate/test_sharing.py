"""What sharing weights over processes changes in a plan."""

from __future__ import annotations

import pytest

from memory.estimate.peaks import predict
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.plan import plan
from model.shapes import weight_counts
from settings.errors import DoesNotFit
from settings.loading import load
from units import GIB

BASE = 200 * 2**20


def machine(processes: int, gib: float = 16.0) -> Machine:
    return Machine(int(gib * GIB), int(gib * GIB), BASE, num_processes=processes)


def config_of(**flags: str):  # type: ignore[no-untyped-def]
    return load("train", {"model_preset": "t5-large", "mixed_precision": "no", "preset": "none", **flags})


def test_weights_and_state_are_divided() -> None:
    shards = 8
    work = Workload(config_of().model, 8, 128, 64, False, "adamw_rms")
    whole = ExecutionPlan(1, 8, 1, 0, 2, "float32", "float32", 2**24)
    parts = predict(work, whole, machine(shards))
    shared = predict(work, ExecutionPlan(**{**whole.__dict__, "shards": shards}), machine(shards))
    count = weight_counts(work.model)["total"]
    for phase in parts:
        assert (
            shared[phase]["weights"] == 4 * count // shards and shared[phase]["optimizer state"] == 8 * count // shards
        )
    assert "gathered weights" in shared["decoder backward"] and "gathered weights" not in parts["decoder backward"]
    assert 0 < shared["decoder backward"]["gradients"] < parts["decoder backward"]["gradients"]
    assert shared["loss"]["gradients"] == parts["loss"]["gradients"], "the head's gradient is whole until it is summed"


def test_auto_shares_where_whole_weights_do_not_fit() -> None:
    roomy = plan(config_of(optimizer="adamw_rms"), machine(4), source_tokens=128, target_tokens=64)
    tight = plan(config_of(optimizer="adamw_rms"), machine(4, 6.0), source_tokens=128, target_tokens=64)
    assert roomy.choice.shards == 1 and tight.choice.shards == 4
    assert tight.choice.accumulation_passes == 1, "sharded weights pass by once a step"
    with pytest.raises(DoesNotFit):
        plan(
            config_of(optimizer="adamw_rms", shard_weights="False"),
            machine(4, 6.0),
            source_tokens=128,
            target_tokens=64,
        )
    with pytest.raises(DoesNotFit):  # each process would wait for tokens that the others do not write
        plan(
            config_of(optimizer="adamw_rms", eval_generate_rows="4"),
            machine(4, 6.0),
            source_tokens=128,
            target_tokens=64,
        )


def test_a_resumed_run_shares_as_it_is_asked_to_now() -> None:
    facts = {"source_tokens": 128, "target_tokens": 64}
    earlier = plan(config_of(shard_weights="True"), machine(2), **facts).choice
    assert earlier.shards == 2
    assert plan(config_of(), machine(2), earlier=earlier, **facts).choice == earlier
    assert plan(config_of(shard_weights="False"), machine(2), earlier=earlier, **facts).choice.shards == 1
    assert plan(config_of(), machine(4), earlier=earlier, **facts).choice.shards == 1
