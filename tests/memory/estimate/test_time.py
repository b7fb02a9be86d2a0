"""The order of the ways to run is the measured one: what is faster is predicted to be faster, by about as much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from devices.sizes import SAMPLE_TOKENS
from memory.estimate.time import (
    Amount,
    Duration,
    RemainingWork,
    Renewal,
    mean_amount,
    predict_seconds,
    predict_times,
    remaining_work,
)
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.plan import plan
from settings.declared import Config, T5ModelConfig
from settings.loading import load
from support.units import GIB, MIB

SHAPE = T5ModelConfig(vocab_size=8000, d_model=512, d_ff=2048, d_kv=64, num_heads=8, num_layers=4, num_decoder_layers=4)
WORK = Workload(SHAPE, 8, 128, 64, False, "adafactor")
KEPT = ExecutionPlan(8, 1, 1, 8, 2, "float32", "float32", 32 * MIB, "fast")
MACHINE = Machine(GIB, GIB, rates=(("float32", 9e10), ("bfloat16", 1e9)))


LARGE = T5ModelConfig(
    vocab_size=8000, d_model=768, d_ff=3072, d_kv=64, num_heads=12, num_layers=12, num_decoder_layers=12
)
IN_LARGE = replace(KEPT, saved_blocks=24)
ONE_ROW = replace(KEPT, batch_size_per_gpu=1)


# Processor time of a step over that of one that keeps all, on one thread of a CPU with AVX2, 8 rows of 128 + 64 tokens;
# the large model has 200M weights, where narrow ones are widened at every pass.
@pytest.mark.parametrize(
    ("shape", "fastest", "choice", "measured"),
    [
        (SHAPE, KEPT, replace(KEPT, saved_blocks=0), 1.16),
        (SHAPE, KEPT, replace(ONE_ROW, micro_batches_per_pass=8), 1.32),
        (SHAPE, KEPT, replace(KEPT, malloc="small"), 1.34),
        (SHAPE, KEPT, replace(ONE_ROW, accumulation_passes=8, storage="bfloat16"), 1.74),
        (LARGE, IN_LARGE, replace(IN_LARGE, saved_blocks=0), 1.30),
        (LARGE, IN_LARGE, replace(ONE_ROW, saved_blocks=24, accumulation_passes=8, storage="bfloat16"), 1.87),
        (
            LARGE,
            IN_LARGE,
            replace(KEPT, saved_blocks=0, batch_size_per_gpu=2, micro_batches_per_pass=4, storage="bfloat16"),
            1.55,
        ),
    ],
)
def test_slower_choices_are_predicted_slower(
    shape: T5ModelConfig, fastest: ExecutionPlan, choice: ExecutionPlan, measured: float
) -> None:
    work = replace(WORK, model=shape)
    predicted = predict_seconds(work, choice, MACHINE) / predict_seconds(work, fastest, MACHINE)
    assert predicted == pytest.approx(measured, rel=0.1 if shape is SHAPE else 0.15)


def test_rows_of_one_length_are_counted_as_a_step_of_them() -> None:
    assert Amount.of_rows(8, 128, 64) == mean_amount(WORK.step_shapes)


# --- what is left of a run

SCHEDULE = RemainingWork(100, 4, 3 * 64)


def settings_of(**flags: Any) -> Config:
    return load("train", {"train_file": "x", "max_steps": 100, "eval_steps": 30, "save_steps": 50, **flags})


def test_what_is_left_of_a_run_is_counted() -> None:
    whole = remaining_work(settings_of(), 0, held_out=1000, answer_tokens=64)
    # Evaluations: 0, 30, 60, 90, 100; saves: 30, 50, 60, 90, 100.
    assert (whole.steps, whole.saves, whole.evaluated_rows) == (100, 5, 5 * 64)
    later = remaining_work(settings_of(), 60, held_out=10, answer_tokens=64, num_processes=4)
    assert (later.steps, later.saves, later.evaluated_rows) == (40, 2, 2 * 3)
    for held_out, rows, saves in ((0, 0, 2), (1, 5, 5)):
        few = remaining_work(settings_of(), 0, held_out, answer_tokens=64)
        assert (few.evaluated_rows, few.saves) == (rows, saves)
    ended = remaining_work(settings_of(), 100, held_out=9, answer_tokens=64)
    nothing = RemainingWork(0, 0, 0, reference_steps=0, answer_tokens=0, beams=1)
    assert ended == replace(nothing, answer_tokens=SAMPLE_TOKENS), "samples are written all the same"
    assert remaining_work(settings_of(sample_rows=0), 100, held_out=9, answer_tokens=64) == nothing
    assert RemainingWork(0, 0, 0) == nothing and Duration.within(6.0, 0.5) == Duration(6.0, 4.0, 9.0)


def test_a_reference_model_sees_the_rows_that_are_left() -> None:
    flags = {"train_file": "x", "finetune_from": "y", "max_steps": 100, "eval_steps": 30, "save_steps": 50}
    for loss, steps in (("sigmoid", 60), ("orpo", 0)):
        config = load("dpo", {**flags, "preference_loss": loss})
        assert remaining_work(config, 40, held_out=9, answer_tokens=64).reference_steps == steps


def test_answers_that_are_scored_take_their_time_in_each_evaluation() -> None:
    plain = remaining_work(settings_of(), 0, held_out=1000, answer_tokens=48)
    scored = remaining_work(settings_of(eval_generate_rows=100), 0, held_out=1000, answer_tokens=48)
    assert (scored.answer_tokens - plain.answer_tokens, scored.beams) == (5 * 2 * 48, 1)
    ranked = settings_of(eval_generate_rows=100, num_beams=20, num_answers=10)
    searched = remaining_work(ranked, 0, held_out=1000, answer_tokens=48)
    assert searched.beams == 20 * 64
    seconds = [predict_times(WORK, KEPT, MACHINE, each).seconds for each in (plain, scored, searched)]
    assert seconds == sorted(set(seconds))


def test_after_the_first_steps_the_rest_takes_as_long_as_they_did() -> None:
    timed = [1.0, 3.0] * 8 + [1.0]  # After three that are not counted.
    mean = 33 / 17
    scatter = np.std(timed) / 17**0.5 / mean
    steps = [9.0] * 3 + timed + [2.0] * 20
    left = 80 * mean * (1 + 0.5)  # Steps, and their share of what lies around them.
    for step_seconds, total, seconds in ((1.0, 150.0, left), (0.0, 0.0, 80 * mean), (1.0, None, 80 * mean)):
        renewal = Renewal(step_seconds, total, steps=100)
        durations = [renewal.after_step(duration) for duration in steps]
        (renewed,) = [duration for duration in durations if duration is not None]
        assert durations.index(renewed) == 19
        assert renewed.seconds == pytest.approx(seconds) and renewed.low < renewed.seconds
        assert renewed.high == pytest.approx((1 + 2 * scatter) * seconds)
    even = Renewal(1.0, 100.0, 100)
    renewed = [even.after_step(2.0) for _ in range(20)][-1]
    assert renewed is not None and renewed.high == pytest.approx(1.1 * 160), "never told as exact"
    short = Renewal(1.0, 150.0, 20)
    assert not any(short.after_step(2.0) for _ in range(20)), "nothing is left then"
    assert Renewal(1.0, 150.0, 21).after_step(0.0) is None


def test_evaluations_and_a_reference_model_take_forwards_and_saves_their_file() -> None:
    step = predict_seconds(WORK, KEPT, MACHINE)
    plain = predict_times(WORK, KEPT, MACHINE, RemainingWork(100, 0, 0)).seconds

    def added(**more: int) -> float:
        return predict_times(WORK, KEPT, MACHINE, replace(RemainingWork(100, 0, 0), **more)).seconds - plain

    assert added(evaluated_rows=8) == pytest.approx(step / 3, rel=0.05), "a third of a step whose activations are kept"
    assert added(reference_steps=2) == pytest.approx(2 * step / 3, rel=0.05)
    assert 0 < added(saves=1) < 10 * step


def test_measured_speeds_tell_the_time_and_narrow_its_range() -> None:
    nominal = predict_times(WORK, KEPT, MACHINE, SCHEDULE)
    fast = predict_times(WORK, KEPT, replace(MACHINE, measured=(("float32", 1.6e11),)), SCHEDULE)
    assert fast.seconds < nominal.seconds
    ranges = [nominal, fast]
    assert all(one.low < one.seconds < one.high for one in ranges)
    assert ranges[1].high / ranges[1].low < ranges[0].high / ranges[0].low


def test_a_falsified_speed_changes_what_is_told_and_not_what_is_chosen() -> None:
    config = load("train", {"train_file": "x", "model_preset": "t5-small", "effective_batch_size": 4})
    machine = Machine(GIB, 16 * GIB, rates=MACHINE.rates)
    false = replace(machine, measured=(("float32", 1.0), ("bfloat16", 1e20)))
    plain = plan(config, machine)
    other = plan(config, false)
    assert plain.seconds != other.seconds
    assert replace(other, seconds=plain.seconds) == plain
