"""Trials are resolved like runs, run by the probe, and every way to fail is a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commands.diagnosis import trials
from commands.diagnosis.trials import run_trials, trials_of
from memory.estimate.workload import Machine
from memory.machines import target_machine
from memory.probe import ProbeRequest, ProbeResult
from settings.declared import Config
from settings.loading import load
from units import MIB


def settings(**flags: str) -> Config:
    return load("doctor", {"model_preset": "tiny", "max_seq_len": "128", **flags})


@pytest.fixture
def machine() -> Machine:
    return target_machine("workstation_32gb_amx")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ProbeRequest]:
    """The requests that reach the probe, which answers at once: the second is killed."""
    requests: list[ProbeRequest] = []

    def answer(request: ProbeRequest, cache_dir: object, time_limit: float) -> ProbeResult:
        assert cache_dir is None, "a doctor measures what is now"
        requests.append(request)
        if len(requests) == 2:
            return ProbeResult(failed="killed by the system for its memory")
        return ProbeResult(100 * MIB, {"load": 200 * MIB, "step": 300 * MIB, "evaluation": 250 * MIB}, 0.5)

    monkeypatch.setattr(trials, "probe", answer)
    return requests


def test_what_is_tried_lies_around_the_users_settings_in_full_rows(machine: Machine, asked: list[ProbeRequest]) -> None:
    told: list[str] = []
    found = trials_of(settings())
    assert {kind for kind, *_ in found} == {"step", "sequence length", "LoRA rank"}
    assert [config.data.max_seq_len for kind, _, config in found if kind == "sequence length"] == [32, 64, 128, 256]
    loaded, *rows = run_trials(found, machine, told.append)
    assert len(told) == len(found) == len(rows), "each is announced, for it may take minutes"
    assert (loaded["kind"], loaded["measured_bytes"]) == ("model load", 200 * MIB)
    for request, row in zip(asked, rows, strict=True):
        lengths = {row for step in request.steps for micro_batch in step for row in micro_batch}
        assert len(lengths) == 1 and next(iter(lengths))[0] == request.config.data.max_seq_len
        assert len(request.steps[0]) == 1 or row["kind"] == "step"
    killed = rows.pop(1)
    assert killed["outcome"].startswith("killed") and killed["measured_bytes"] is None and killed["predicted_bytes"]
    assert {(row["measured_bytes"], row["seconds"], row["outcome"]) for row in rows} == {(300 * MIB, 0.5, "")}


def test_what_does_not_fit_or_takes_too_long_is_told_and_not_tried(machine: Machine, asked: list[ProbeRequest]) -> None:
    trial = "step", "as planned", settings(memory_budget="64M")
    (row,) = run_trials([trial], replace(machine, budget_bytes=64 * MIB), print)
    assert row["outcome"].startswith("does not fit") and row["predicted_bytes"] is None
    slow = replace(machine, rates=(("float32", 1e6), ("bfloat16", 1e6)))
    (row,) = run_trials([("step", "as planned", settings())], slow, print)
    assert row["outcome"].startswith("not tried") and row["predicted_bytes"] > 0 and asked == []
