"""A run's plan is made for the rows that come, and is corrected by what a probe measures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import devices
from memory.budget import FLAG, Budget
from memory.probe import KILLED, ProbeRequest, ProbeResult
from memory.step_work import effective_batch
from settings.errors import DoesNotFit
from settings.loading import load
from support.units import GIB, MIB
from tests.training.setups import opened
from training.setup import plan as planning
from training.setup.data import PreparedData
from training.setup.resolved import Beginning

BASE = 200 * MIB
pytestmark = pytest.mark.usefixtures("processor_class")


Opened = tuple[Beginning, PreparedData]


@pytest.fixture(scope="module")
def begin(processor_class: object, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    tmp_path = tmp_path_factory.mktemp("begun")
    lengths = [60] * 3 + [10] * 97
    lines = [json.dumps({"prompt": "p" * length, "response": "r" * length}) for length in lengths]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    flags = {
        "train_file": tmp_path / "rows.jsonl",
        "tokenizer_type": "byte",
        "max_seq_len": 64,
        "effective_batch_size": 8,
        "cache_dir": tmp_path / "cache",
        "prepare_workers": 0,
        "max_steps": 2,
        "run_name": "x",
    }
    return opened(load("train", {name: str(value) for name, value in flags.items()}))


def changed(begin: Opened, **settings: object) -> Opened:
    run, data = begin
    return replace(run, config=run.config.with_changes(**settings)), data


def plan_of(begin: Opened, budget: int, base: int = BASE, may_probe: bool = False) -> Any:
    run, data = begin if may_probe else changed(begin, probe=False)
    limits = Budget(budget, None, 16 * GIB, (), "flag", 0)
    return planning.plan_here(run, data, planning.look_ahead(run, data, limits), limits, base).plan


def test_a_plan_becomes_what_a_probe_has_measured(begin: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = changed(begin, probe=True)
    measured = ProbeResult(BASE, {"step": BASE + 150 * MIB}, 0.1, 1.0)
    monkeypatch.setattr(planning, "probe", lambda request, cache_dir=None: measured)
    plain = plan_of(begin, GIB)
    probed = plan_of(begin, GIB, may_probe=True)
    assert probed.choice == plain.choice
    assert probed.unprobed_peak_bytes == plain.peak_bytes
    assert BASE + 150 * MIB <= probed.peak_bytes <= 1.03 * (BASE + 150 * MIB)  # Later steps may take more.
    assert any("probe" in reason for reason in probed.reasons)


@pytest.mark.parametrize("binding", [FLAG, "available RAM"])
def test_what_others_hold_does_not_change_the_rows_of_a_step(begin: Opened, binding: str) -> None:
    begin = changed(begin, effective_batch_size="auto")
    for installed, rows in ((16 * 10**9, 32), (12 * 10**9, 8)):
        for available in (11 * 10**9, 5 * 10**9):
            budget = Budget(GIB, None, available, (), binding, 0, installed_bytes=installed)
            machine = planning.machine_of(devices.pick("cpu", 0), budget, BASE, 1)
            assert effective_batch(begin[0].config.train, machine) == rows


class Probe:
    """Stands for the child that measures a plan, and remembers what it was asked to measure."""

    def __init__(self, bytes_above: int = 0, failed: str = "") -> None:
        self.requests: list[ProbeRequest] = []
        self.result = ProbeResult(BASE, {"step": BASE + bytes_above}, 0.1, 1.0)
        if failed:
            self.result = ProbeResult(failed=failed)

    def __call__(self, request: ProbeRequest, cache_dir: Path | None = None) -> ProbeResult:
        self.requests.append(request)
        return self.result


def test_a_probe_keeps_to_the_budget(begin: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(failed="not run")
    monkeypatch.setattr(planning, "probe", probe)
    begin = changed(begin, probe=True, num_layers=12, num_decoder_layers=12, gradient_checkpointing=True)
    base = 8 * MIB  # so little that a smaller plan fits beside it, in either dtype
    plain = plan_of(begin, GIB, base)
    budget = plain.peak_bytes + MIB
    chosen = plan_of(begin, budget, base, may_probe=True)
    assert chosen.choice == plain.choice
    (request,) = probe.requests
    assert request.choice != plain.choice
    assert request.choice == plan_of(begin, budget - base, base).choice  # It fits beside this process.
    assert 0 < request.host_bytes <= budget - base


def test_a_killed_probe_asks_for_a_smaller_plan(begin: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = changed(begin, probe=True, num_layers=12, num_decoder_layers=12)
    monkeypatch.setattr(planning, "probe", Probe(failed=KILLED))
    base = 8 * MIB  # so little that a smaller plan fits beside it, in either dtype
    plain = plan_of(begin, GIB, base)
    try:
        killed = plan_of(begin, int(plain.peak_bytes * 1.02), base, may_probe=True)
    except DoesNotFit:
        return
    assert killed.choice != plain.choice
