"""What sharing weights over processes changes in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from config import load
from memory.cost.prediction import Choice, Machine, Work, predict
from memory.cost.sharing import communication_seconds
from memory.plan import plan
from model.shapes import weight_counts
from settings.errors import DoesNotFit, UserError
from units import GIB

BASE = 200 * 2**20


def machine(processes: int, gib: float = 16.0) -> Machine:
    return Machine(int(gib * GIB), int(gib * GIB), BASE, num_processes=processes)


def config_of(**flags: str):  # type: ignore[no-untyped-def]
    return load("train", {"model_preset": "t5-large", "mixed_precision": "no", "preset": "none", **flags})


def test_weights_and_state_are_divided() -> None:
    shards = 8
    work = Work(config_of().model, 8, 128, 64, False, "adamw_rms")
    whole = Choice(1, 8, 1, 0, 2, "float32", "float32", 2**24)
    parts = predict(work, whole, machine(shards))
    shared = predict(work, Choice(**{**whole.__dict__, "shards": shards}), machine(shards))
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


def test_sharing_takes_several_processes() -> None:
    with pytest.raises(UserError, match="shard_weights = True, shares the weights out over processes"):
        plan(config_of(shard_weights="True"), machine(1), source_tokens=128, target_tokens=64)
    with pytest.raises(UserError, match="max_grad_norm"):
        config_of(shard_weights="True", max_grad_norm="1.0")


def test_fp16_is_never_sharded() -> None:
    """Its loss scale follows from all gradients, of which a process would see its own rows alone."""
    rates = (("float32", 1e13), ("bfloat16", 1e13), ("float16", 4e13))
    four = replace(machine(4, 6.0), rates=rates)
    facts = {"source_tokens": 128, "target_tokens": 64}
    assert plan(config_of(optimizer="adamw_rms"), four, **facts).choice.shards == 4
    with pytest.raises(DoesNotFit):
        plan(config_of(optimizer="adamw_rms", mixed_precision="fp16"), four, **facts)
    earlier = Choice(1, 2, 1, 0, 2, "float32", "float16", 2**24, shards=4)
    roomy = replace(machine(4), rates=rates)
    assert plan(config_of(mixed_precision="auto"), roomy, earlier=earlier, **facts).choice.shards == 1


def test_a_resumed_run_shares_as_it_is_asked_to_now() -> None:
    facts = {"source_tokens": 128, "target_tokens": 64}
    earlier = plan(config_of(shard_weights="True"), machine(2), **facts).choice
    assert earlier.shards == 2
    assert plan(config_of(), machine(2), earlier=earlier, **facts).choice == earlier
    assert plan(config_of(shard_weights="False"), machine(2), earlier=earlier, **facts).choice.shards == 1
    assert plan(config_of(), machine(4), earlier=earlier, **facts).choice.shards == 1


def test_bytes_on_the_wire() -> None:
    """Ring all-reduce: 2 (p-1)/p n; sharded: two gathers and a reduce-scatter."""
    assert communication_seconds(1000, 1, 1, 4, 4, 1.0) == 0
    assert communication_seconds(1000, 4, 1, 4, 4, 1.0) == pytest.approx(2 * 0.75 * 4000)
    assert communication_seconds(1000, 4, 4, 2, 4, 1.0) == pytest.approx(0.75 * (2 * 2000 + 4000))
