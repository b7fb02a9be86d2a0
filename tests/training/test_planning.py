"""A run's plan is made for the rows that come, and is corrected by what a probe measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

import devices
from config import load
from data.loader import StepLoader
from data.prepare import prepare
from memory.budget import Budget
from memory.probe import KILLED, ProbeRequest, ProbeResult
from memory.units import GIB, MIB
from settings import DoesNotFit
from training import planning
from training.planning import make_plan
from training.startup import Start
from training.state import TrainingState

BASE = 200 * MIB


@pytest.fixture
def begin(tmp_path: Path) -> Start:
    lengths = [60] * 3 + [10] * 97
    lines = [json.dumps({"prompt": "p" * length, "response": "r" * length}) for length in lengths]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    flags = {
        "train_file": tmp_path / "rows.jsonl", "tokenizer_type": "byte", "max_seq_len": 64, "effective_batch_size": 8,
        "cache_dir": tmp_path / "cache", "prepare_workers": 0, "max_steps": 2, "run_name": "x",
    }  # fmt: skip
    config = load("train", {name: str(value) for name, value in flags.items()})
    made = prepare(config)
    loaders = (StepLoader(split, made.objective, config) for split in (made.train_dir, made.validation_dir))
    return cast(Any, Start)(config, made, None, *loaders, None, TrainingState(), False, [])


def plan_of(begin: Start, budget: int, base: int = BASE, **flags: Any) -> Any:
    return make_plan(begin, devices.pick("cpu", 0), Budget(budget, None, 16 * GIB, (), "flag", 0), base, 1, **flags)


def measured(bytes_above: int) -> Any:
    asked: list[ProbeRequest] = []

    def probe(request: ProbeRequest, cache_dir: Path | None = None) -> ProbeResult:
        asked.append(request)
        return ProbeResult(BASE, {"step": BASE + bytes_above}, 0.1, 1.0)

    probe.asked = asked  # type: ignore[attr-defined]
    return probe


def test_short_batches_are_planned_short(begin: Start) -> None:
    machine = planning.machine_of(devices.pick("cpu", 0), Budget(GIB, None, GIB, (), "flag", 0), BASE, 1)
    shapes, evaluation = planning.shapes_of(begin, machine)
    most = max(
        sum(
            int(n)
            for batch in begin.loader.micro_batches(step, effective_batch_size=8, batch_size=8)
            for n in batch.input_lengths
        )
        for step in range(2)
    )
    assert shapes.step.source == most < 8 * begin.loader.longest[0]
    assert evaluation.longest_row.source <= begin.validation.longest[0]


def test_a_plan_becomes_what_was_measured(begin: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    begin.config.memory.probe = True
    monkeypatch.setattr(planning, "probe", measured(150 * MIB))
    plain, probed = plan_of(begin, GIB), plan_of(begin, GIB, may_probe=True)
    assert probed.choice == plain.choice
    assert probed.unprobed_peak_bytes == plain.peak_bytes
    assert probed.peak_bytes == pytest.approx(BASE + 150 * MIB, rel=0.001)
    assert any("probe" in reason for reason in probed.reasons)


def test_a_plan_that_is_too_small_is_made_again(begin: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    begin.config.memory.probe = True
    probe = measured(700 * MIB)
    monkeypatch.setattr(planning, "probe", probe)
    with pytest.raises(DoesNotFit):
        plan_of(begin, 500 * MIB, may_probe=True)
    assert len(probe.asked) == 1


def test_auto_probes_near_the_budget_alone(begin: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = measured(60 * MIB)
    monkeypatch.setattr(planning, "probe", probe)
    plain = plan_of(begin, GIB, may_probe=True)
    assert not probe.asked and plain.unprobed_peak_bytes is None
    near = plain.peak_bytes + BASE + MIB  # the child fits beside this process
    monkeypatch.setattr(planning, "PROBE_FROM", 0.9 * plain.peak_bytes / near)
    plan_of(begin, near, may_probe=True)
    assert len(probe.asked) == 1
    begin.config.memory.probe = False
    plan_of(begin, near, may_probe=True)
    assert len(probe.asked) == 1


def test_where_the_probe_would_break_the_budget_the_plan_stands(begin: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = measured(60 * MIB)
    monkeypatch.setattr(planning, "probe", probe)
    budget = int(plan_of(begin, GIB).peak_bytes * 1.15)
    assert plan_of(begin, budget, may_probe=True).choice == plan_of(begin, budget).choice
    assert not probe.asked


def test_a_probe_that_is_asked_for_keeps_to_the_budget(begin: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ProbeRequest] = []

    def probe(request: ProbeRequest, cache_dir: Path | None = None) -> ProbeResult:
        asked.append(request)
        return ProbeResult(failed="not run")

    monkeypatch.setattr(planning, "probe", probe)
    begin.config.memory.probe = True
    begin.config.model.num_layers = begin.config.model.num_decoder_layers = 12
    base = 40 * MIB
    plain = plan_of(begin, GIB, base)
    budget = plain.peak_bytes + MIB
    chosen = plan_of(begin, budget, base, may_probe=True)
    assert chosen.choice == plain.choice
    (request,) = asked
    assert request.choice != plain.choice
    assert request.choice == plan_of(begin, budget - base, base).choice  # what fits beside this process


def test_a_probe_that_fits_nowhere_is_told(begin: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = measured(60 * MIB)
    monkeypatch.setattr(planning, "probe", probe)
    begin.config.memory.probe = True
    told = plan_of(begin, plan_of(begin, GIB).peak_bytes, may_probe=True)
    assert not probe.asked
    assert any(reason.startswith("not probed") for reason in told.reasons)


def test_a_killed_probe_asks_for_a_smaller_plan(begin: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    begin.config.memory.probe = True
    monkeypatch.setattr(planning, "probe", lambda request, cache_dir=None: ProbeResult(failed=KILLED))
    begin.config.model.num_layers = begin.config.model.num_decoder_layers = 12
    base = 40 * MIB
    plain = plan_of(begin, GIB, base)
    try:
        killed = plan_of(begin, int(plain.peak_bytes * 1.02), base, may_probe=True)
    except DoesNotFit:
        return
    assert killed.choice != plain.choice
