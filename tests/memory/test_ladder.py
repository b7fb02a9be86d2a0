"""Which rungs settings and machine leave of the ladder, and how steps are cut on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memory.estimate.precision import Precision
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.ladder import ALL, NONE, REUSED, SOME, TIGHT, USUAL, Ladder
from memory.step_settings import StepSettings
from settings.declared import T5ModelConfig
from settings.loading import load
from support.units import GIB, MIB

SHAPE = T5ModelConfig(vocab_size=800, d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2, num_decoder_layers=1)
WORK = Workload(SHAPE, 6, 64, 32, True, "adafactor", steps=500)
CPU = Machine(GIB, 16 * GIB, rates=(("float32", 1e11), ("bfloat16", 1e10)), is_another=True)
GPU = replace(
    CPU, rates=(("float32", 1e13), ("bfloat16", 4e13)), pads_attention=True, fuses_attention=True, host_bytes=16 * GIB
)
LORA = {"lora_rank": "4", "is_finetune": "True"}
RUNNING = ExecutionPlan(2, 3, 1, 0, 4, "bfloat16", "float32", MIB, weights_in="file", offloaded_blocks=2)


def ladder_of(machine: Machine, flags: dict[str, str], work: Workload = WORK, **given: Any) -> Ladder:
    settings = StepSettings.of(load("train", {"train_file": "x", **flags}))
    return Ladder(replace(settings, weights_folder=Path("x")), machine, work, **given)


LETTERS = {ALL: "a", SOME: "s", NONE: "n"} | {REUSED: "r", USUAL: "u", TIGHT: "t"}
BITS = {"float32": "32", "bfloat16": "16", "int8": "8"}


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        (CPU, {}, "a32r a32u a16u s32u s16t n16t n32ufile n16tfile"),
        (CPU, {"memory_mode": "standard"}, "a32r a32u a16u a16t a32ufile a16tfile"),
        (CPU, {"memory_mode": "low"}, "a32u a16u s32u s16t n16t n32ufile n16tfile"),
        (CPU, {"memory_mode": "ultra"}, "n16u n16t n16ufile n16tfile"),
        (CPU, {"gradient_checkpointing": "True"}, "n32u n16u n16t n32ufile n16tfile"),
        (CPU, {"gradient_checkpointing": "False", "memory_mode": "ultra"}, "a16u a16t a16ufile a16tfile"),
        (CPU, {"weights_in": "device"}, "a32r a32u a16u s32u s16t n16t n32u"),
        (CPU, {"weights_in": "file", "memory_mode": "low"}, "a32ufile a16ufile s32ufile s16tfile n16tfile n32ufile"),
        (CPU, LORA, "a32r a32u a16u s32u s16t n16t s8t n32ufile n16tfile n8tfile"),
        (GPU, {}, "a16u s16u s16t n16t n16tram n16ufile n16tfile"),
        (GPU, {"weights_in": "ram"}, "a16uram s16uram s16tram n16tram n16uram"),
    ],
)
def test_rungs(machine: Machine, flags: dict[str, str], expected: str) -> None:
    """Activations that are kept, bits of weights, memory, and where offloaded weights are."""
    rungs = ladder_of(machine, flags).rungs
    names = [
        LETTERS[rung.activations]
        + BITS[rung.precision.storage]
        + LETTERS[rung.memory]
        + rung.weights_in.replace("device", "")
        for rung in rungs
    ]
    assert " ".join(names) == expected
    assert len({rung.describe() for rung in rungs}) == len(rungs), "each has a name of its own"


@pytest.mark.parametrize("rows", [1, 5, 7, 24])
def test_every_plan_has_all_rows_of_a_step(rows: int) -> None:
    ladder = ladder_of(CPU, {}, replace(WORK, rows=rows))
    for plan in (plan for rung in ladder.rungs for family in ladder.families(rung) for plan in family):
        most = plan.batch_size_per_gpu * plan.gradient_accumulation_steps
        assert most >= rows > most - plan.batch_size_per_gpu, "no empty micro-batch, no row left over"


def test_a_run_under_way_keeps_its_dtypes_and_where_its_weights_are() -> None:
    ladder = ladder_of(CPU, {}, precision=Precision.of("bfloat16", "float32"), running=RUNNING)
    plans = [plan for rung in ladder.rungs for family in ladder.families(rung) for plan in family]
    assert {(plan.storage, plan.weights_in, plan.offloaded_blocks) for plan in plans} == {("bfloat16", "file", 2)}
    families = list(ladder_of(GPU, {}).as_before(replace(RUNNING, malloc="untrimmed", hold_gradients=True)))
    assert [(family[0].weights_in, family[0].malloc, len(family)) for family in families] == [
        (place, malloc, blocks)
        for place, blocks in (("device", 1), ("ram", 3), ("file", 3))
        for malloc in ("untrimmed", "fast")
    ]
    assert not any(plan.hold_gradients for family in families for plan in family)
    (fast,) = ladder_of(CPU, {"weights_in": "device"}).as_before(RUNNING)
    assert [(plan.malloc, plan.offloaded_blocks) for plan in fast] == [("fast", 0)]


def test_families_cut_a_step_in_every_way_and_save_more_from_plan_to_plan() -> None:
    """Six rows in micro-batches of 1, 2, 3 and 6, of which there are 6, 3, 2 and 1, in one pass or in several."""
    ladder = ladder_of(CPU, {"weights_in": "auto"})
    for rung in ladder.rungs:
        families = ladder.families(rung)
        cuts = {
            (family[0].batch_size_per_gpu, family[0].micro_batches_per_pass, family[0].accumulation_passes)
            for family in families
        }
        ways = [(1, 6, 1), (1, 3, 2), (1, 2, 3), (1, 1, 6), (2, 3, 1), (2, 1, 3), (3, 2, 1), (3, 1, 2), (6, 1, 1)]
        assert cuts == set(ways) and len(families) == len(ways) * (2 if rung.memory == TIGHT else 1)
        for family in families:
            saved = {ALL: [3], SOME: [3, 2, 1, 0], NONE: [0]}[rung.activations]
            offloaded = [0] if rung.weights_in == "device" else [1, 2, 3]
            expected = [(blocks, count) for blocks in offloaded for count in saved]
            assert [(plan.offloaded_blocks, plan.saved_blocks) for plan in family] == expected
            assert {plan.loss_chunk_bytes for plan in family} == {(8 if rung.memory == TIGHT else 32) * MIB}
    compiling = ladder_of(replace(GPU, no_compiler=""), {"mixed_precision": "bf16"})
    for rung in compiling.rungs:
        plans = [plan for family in compiling.families(rung) for plan in family]
        assert {plan.compiled for plan in plans} == {rung.weights_in == "device"}
        assert {plan.loss_chunk_bytes for plan in plans} == {(8 if rung.memory == TIGHT else 256) * MIB}
    (named, *_) = ladder_of(GPU, {"weights_in": "ram"}).rungs
    assert ladder_of(GPU, {"weights_in": "ram"}).families(named)[0][0].offloaded_blocks == 3, "all, where it is named"
