"""Trials are planned like runs, run by the probe, and every way to fail is a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memory.probe
from commands.diagnosis import trials
from commands.diagnosis.trials import Result, Trial, planned_for, run_trials, trials_of
from config import Config, load
from memory.cost.prediction import Machine
from memory.machines import target_machine
from memory.probe import ProbeRequest, ProbeResult
from units import GIB, MIB


def settings(**flags: str) -> Config:
    return load("doctor", {"model_preset": "tiny", "max_seq_len": "128", **flags})


@pytest.fixture
def machine() -> Machine:
    return target_machine("workstation_32gb_amx")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ProbeRequest]:
    """The requests that reach the probe, which answers at once."""
    requests: list[ProbeRequest] = []

    def answer(request: ProbeRequest, cache_dir: object, time_limit: float) -> ProbeResult:
        assert cache_dir is None, "a doctor measures what is now"
        requests.append(request)
        return ProbeResult(100 * MIB, {"load": 200 * MIB, "step": 300 * MIB, "evaluation": 250 * MIB}, 0.5)

    monkeypatch.setattr(trials, "probe", answer)
    return requests


def test_what_is_tried_lies_around_the_users_settings(machine: Machine) -> None:
    found = trials_of(settings(), machine)
    planned = planned_for(settings(), machine)[0].choice.batch_size_per_gpu
    assert found[0].kind == "step" and found[0].config.train.effective_batch_size == "auto"
    lengths = [trial.config.data.max_seq_len for trial in found if trial.kind == "sequence length"]
    assert lengths == [32, 64, 128, 256]
    batch_sizes = [trial.config.train.batch_size_per_gpu for trial in found if trial.kind == "micro-batch"]
    assert {1, planned, 2 * planned} <= set(batch_sizes) and batch_sizes == sorted(set(batch_sizes))
    assert all(trial.config.train.sample_rows == 0 for trial in found)
    assert len({(trial.kind, trial.label) for trial in found}) == len(found)


def test_each_trial_is_one_micro_batch_of_full_rows(machine: Machine, asked: list[ProbeRequest]) -> None:
    told: list[str] = []
    found = trials_of(settings(), machine)
    results = list(run_trials(found, machine, told.append))
    assert len(told) == len(found) and f"1 of {len(found)}: step as planned" in told[0], "minutes without a word"
    assert results[0] == Result("model load", "weights", results[0].predicted_bytes, 200 * MIB)
    for request, result in zip(asked, results[1:], strict=True):
        lengths = {row for step in request.steps for micro_batch in step for row in micro_batch}
        assert len(lengths) == 1 and next(iter(lengths))[0] == request.config.data.max_seq_len
        assert result.measured_bytes == 300 * MIB and result.seconds == 0.5 and result.outcome == ""
        assert result.tokens == sum(sum(row) for micro_batch in request.steps[0] for row in micro_batch)
        if result.kind == "micro-batch":
            assert [len(micro_batch) for micro_batch in request.steps[0]] == [int(result.label)]


def test_what_does_not_fit_is_told_and_not_tried(machine: Machine, asked: list[ProbeRequest]) -> None:
    (result,) = run_trials(
        [Trial("step", "as planned", settings(memory_budget="64M"))], with_budget(machine, 64 * MIB), print
    )
    assert result.outcome.startswith("does not fit: the least it needs is about") and asked == []
    assert result.predicted_bytes is None and result.measured_bytes is None


def with_budget(machine: Machine, size: int) -> Machine:
    return replace(machine, budget_bytes=size)


def test_what_would_take_too_long_is_told_and_not_tried(machine: Machine, asked: list[ProbeRequest]) -> None:
    slow = replace(machine, rates=(("float32", 1e6), ("bfloat16", 1e6)))
    (result,) = run_trials([Trial("step", "as planned", settings())], slow, print)
    assert result.outcome.startswith("not tried: a step would take about") and asked == []
    assert result.predicted_bytes is not None and result.predicted_bytes > 0


def test_the_time_of_a_step_holds_all_its_passes(
    machine: Machine, asked: list[ProbeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, shapes = planned_for(settings(), machine)
    parts = replace(planned, choice=replace(planned.choice, accumulation_passes=64), seconds=trials.TRIAL_SECONDS / 50)
    monkeypatch.setattr(trials, "planned_for", lambda *given: (parts, shapes))
    (_, result) = run_trials([Trial("step", "as planned", settings())], machine, print)
    assert result.outcome == "" and len(asked) == 1


def test_a_killed_trial_is_a_row_and_the_next_one_runs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [ProbeResult(failed="killed by the system for its memory"), ProbeResult(1, {"step": GIB}, 2.0)]
    monkeypatch.setattr(trials, "probe", lambda *asked: answers.pop(0))
    config = settings()
    killed = Trial("step", "as planned", config)
    loaded, first, second = run_trials([killed, Trial("micro-batch", "1", config)], machine, print)
    assert loaded.outcome == first.outcome == "killed by the system for its memory"
    assert first.measured_bytes is None and first.seconds is None and first.predicted_bytes
    assert (second.measured_bytes, second.seconds, second.outcome) == (GIB, 2.0, "")


def test_a_child_that_is_really_killed_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.probe, "START", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    loaded, step = run_trials([Trial("step", "as planned", settings())], machine, print)
    assert "killed" in loaded.outcome and "killed" in step.outcome and step.measured_bytes is None
