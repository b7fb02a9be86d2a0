"""Weights rest where they fit: in memory, in the RAM beside a device, in a file; and as few of them elsewhere as it
takes.
"""

from __future__ import annotations

from memory.estimate.workload import BASE_BYTES, DEVICE, FILE, RAM, Machine
from memory.plan import Plan, plan
from model.shapes import weight_counts
from settings.declared import Config
from settings.loading import load
from support.units import GIB, MIB

RATES = (("float32", 1e11), ("bfloat16", 1e12))


def settings_of(**flags: object) -> Config:
    common = {"model_preset": "t5-base", "max_seq_len": 64, "effective_batch_size": 4, "preset": "none", **flags}
    return load("train", {name: str(value) for name, value in common.items()})


def planned(budget: int, host_bytes: int = 0, **flags: object) -> Plan:
    base = 0 if host_bytes else BASE_BYTES
    machine = Machine(budget, 16 * GIB, base, RATES, host_bytes=host_bytes)
    return plan(settings_of(**flags), machine, source_tokens=64, target_tokens=32)


def test_a_file_is_used_where_memory_ends_and_only_as_far() -> None:
    weights = 2 * weight_counts(settings_of().model)["total"]
    roomy, tight, tighter = (planned(BASE_BYTES + size) for size in (6 * weights, weights, weights // 2 + 100 * MIB))
    assert (roomy.choice.weights_in, roomy.choice.offloaded_blocks) == (DEVICE, 0)
    assert tight.choice.weights_in == tighter.choice.weights_in == FILE
    assert 0 < tight.choice.offloaded_blocks < tighter.choice.offloaded_blocks
    for chosen in (tight, tighter):
        assert chosen.peak_bytes <= chosen.budget_bytes
        assert any("offloaded to a file" in reason for reason in chosen.reasons)
    assert roomy.seconds <= tight.seconds <= tighter.seconds, "more memory is faster"


def test_beside_a_device_the_ram_comes_before_a_file() -> None:
    weights = 2 * weight_counts(settings_of().model)["total"]
    assert planned(weights, host_bytes=64 * GIB).choice.weights_in == RAM
    assert planned(weights, host_bytes=40 * MIB).choice.weights_in == FILE
    choice = planned(8 * weights, host_bytes=64 * GIB, weights_in=RAM).choice
    assert (choice.weights_in, choice.offloaded_blocks) == (RAM, 24), "all of them, where it is named"
