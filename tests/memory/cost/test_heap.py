"""What malloc keeps: nothing before the loss, pieces after recomputed blocks, and never more than came and went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from config import T5ModelConfig
from limits import HEAP_BELOW
from memory.cost.heap import TRIMMED_BYTES, UNTRIMMED_SHARE, Heap
from memory.cost.prediction import STEP_PHASES, Choice, Machine, Work, changeable, predict
from memory.cost.step_peaks import StepPeaks
from units import GIB, MIB

SHAPE = T5ModelConfig(d_model=256, d_kv=32, d_ff=1024, num_layers=2, num_decoder_layers=2, num_heads=8, vocab_size=8192)
WORK = Work(SHAPE, 8, 128, 128, False, "adafactor")
MACHINE = Machine(GIB, GIB)
RECOMPUTING = Choice(8, 1, 1, 0, 8, "float32", "float32", 8 * MIB)
KEEPING = replace(RECOMPUTING, saved_blocks=4)
PHASES = (
    "loss",
    "decoder backward",
    "encoder backward",
    "block update",
    "last update",
    "evaluation",
    "samples",
    "save",
)


def slack(choice: Choice, phase: str) -> int:
    return Heap(StepPeaks(WORK, choice, MACHINE)).slack(phase, 0, 0)


@pytest.mark.parametrize("choice", [RECOMPUTING, KEEPING])
def test_before_the_loss_the_heap_is_trimmed(choice: Choice) -> None:
    assert slack(choice, "loss") == TRIMMED_BYTES
    assert all(slack(choice, phase) > TRIMMED_BYTES for phase in PHASES[1:])
    assert slack(choice, "load") == 0


def test_recomputed_blocks_leave_more_pieces_than_saved_ones() -> None:
    assert slack(RECOMPUTING, "decoder backward") > slack(KEEPING, "decoder backward")
    recomputing, keeping = (replace(c, batch_size_per_gpu=2, micro_batches_per_pass=4) for c in (RECOMPUTING, KEEPING))
    assert slack(keeping, "save") > slack(recomputing, "save"), "graphs that are gone stay in the heap"


def test_casts_of_small_matrices_lie_in_the_heap() -> None:
    casting = replace(RECOMPUTING, storage="bfloat16")
    of_one = slack(casting, "evaluation") - slack(RECOMPUTING, "evaluation")
    inner, gates = SHAPE.num_heads * SHAPE.d_kv, 2
    assert of_one == 4 * (8 * SHAPE.d_model * inner + gates * SHAPE.d_model * SHAPE.d_ff)
    wide = replace(SHAPE, d_model=HEAP_BELOW // 4, d_ff=1, d_kv=1, num_heads=1)  # every matrix is as large as is mapped
    walk = StepPeaks(replace(WORK, model=wide), casting, MACHINE)
    assert Heap(walk).slack("evaluation", 0, 0) - TRIMMED_BYTES == walk.blocks.tile_bytes()


def test_where_nearly_all_is_mapped_little_is_kept() -> None:
    small = replace(RECOMPUTING, malloc="small")
    for phase, parts in predict(WORK, small, MACHINE).items():
        assert parts["allocator slack"] <= 0.02 * changeable(parts), phase


def test_an_untrimmed_heap_stays_as_large_as_the_highest_place_of_a_step_made_it() -> None:
    phases = predict(WORK, replace(KEEPING, malloc="untrimmed"), MACHINE)
    trimmed = predict(WORK, KEEPING, MACHINE)
    step = {sum(phases[phase].values()) for phase in STEP_PHASES}
    assert len(step) == 1, "from step to step nothing is given back"
    stays = trimmed["loss"]["libraries"]
    passing = max(changeable(trimmed[phase]) - trimmed[phase]["allocator slack"] for phase in STEP_PHASES) - stays
    fixed = sum(trimmed["loss"].values()) - changeable(trimmed["loss"]) + stays
    assert step.pop() - fixed == pytest.approx((1 + UNTRIMMED_SHARE) * passing, abs=8)
    assert sum(phases["evaluation"].values()) < sum(phases["loss"].values()), "cleaned before"
