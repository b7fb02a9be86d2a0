"""The probe measures in a child process, agrees with the plan, is kept, and tells when it was killed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import devices
from childproc import FAILED, MEMORY, TIME, ChildDied
from memory.estimate.peaks import peak_of, predict
from memory.estimate.shapes import Shapes
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.observe.processes import has_proc
from memory.probe import (
    ProbeRequest,
    ProbeResult,
    correction_of,
    fingerprint,
    for_later_steps,
    probe,
)
from settings.loading import load
from tests.fake_device import FakeDevice
from training import probing
from units import GIB, MIB

CHOICE = ExecutionPlan(2, 2, 1, 1, 2, "float32", "float32", 8 * MIB, "small")


def request_of(choice: ExecutionPlan = CHOICE, source: int = 128, target: int = 48, **flags: Any) -> ProbeRequest:
    words = {"train_file": "x", "model_preset": "tiny", "num_threads": 1, **flags}
    config = load("train", {name: str(value) for name, value in words.items()})
    shapes = Shapes.longest(4, source, target)
    return ProbeRequest(
        config, choice, tuple(map(tuple, shapes.worst_steps(choice.batch_size_per_gpu))), ((source, target),) * 2
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[ProbeResult, Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return probe(request_of(), folder), folder


@pytest.mark.skipif(not has_proc(), reason="the exact peak needs Linux")
def test_plan_and_probe_agree(measured: tuple[ProbeResult, Path]) -> None:
    result, _ = measured
    assert not result.failed and result.phases is not None
    work = Workload(request_of().config.model, 4, 128, 48, False, "adafactor")
    phases = predict(work, CHOICE, Machine(GIB, GIB, result.base_bytes))
    peak = max(result.phases.values())
    assert peak_of(phases)[1] == pytest.approx(peak, rel=0.05)
    machine = Machine(GIB, GIB, result.base_bytes, correction=correction_of(result, phases))
    assert peak_of(predict(work, CHOICE, machine))[1] == pytest.approx(peak, rel=0.001)


def test_a_device_that_runs_out_of_memory_says_that_the_plan_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(request: ProbeRequest, device: FakeDevice) -> None:
        with device.watched():
            torch.ones(2 * MIB)

    card = FakeDevice(64 * MIB)
    monkeypatch.setattr(devices, "pick", lambda *args: card)
    monkeypatch.setattr(probing, "_measure", run_out)
    monkeypatch.setattr(probing, "tune_malloc", lambda kind: None)
    request = request_of()
    assert probing.measure(request) is None
    with pytest.raises(MemoryError):  # the run's own limit counts
        probing.measure(dataclasses.replace(request, limit_bytes=4 * MIB))
    assert fingerprint(dataclasses.replace(request, computes_on="another card")) != fingerprint(request)


def test_a_cache_that_cannot_be_written_costs_only_the_memory_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = ProbeResult(phases={"step": 7})
    monkeypatch.setattr("memory.probe._run", lambda request, time_limit: measured)
    (tmp_path / "probes").write_text("a file in place of the folder")
    assert probe(request_of(), tmp_path) is measured


def test_later_steps_have_room_above_a_probe() -> None:
    phases = predict(Workload(request_of().config.model, 4, 128, 48, False, "adafactor"), CHOICE, Machine(GIB, GIB, 0))

    def room(measured: float, is_varied: bool = False) -> float:
        return for_later_steps(measured, phases, is_varied) - measured

    assert (
        0 < room(1.2) == pytest.approx(room(1.0)) and room(1.0) < room(0.8) < 0.2
    )  # the probe takes off most of the rest, not all
    assert all(room(measured, is_varied=True) > room(measured) for measured in (0.8, 1.0, 1.2))


def test_a_result_is_kept(measured: tuple[ProbeResult, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    result, folder = measured
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    again = probe(request_of(), folder, time_limit=0.001)  # a second measurement could not end in time
    assert again == dataclasses.replace(result, is_cached=True, seconds=0.0)


def test_what_changes_memory_changes_the_fingerprint() -> None:
    base = fingerprint(request_of())
    assert fingerprint(request_of(learning_rate=0.5, run_name="other")) == base
    assert fingerprint(request_of(optimizer="adamw")) != base
    assert fingerprint(request_of(source=64)) != base
    assert fingerprint(request_of(dataclasses.replace(CHOICE, saved_blocks=0))) != base


@pytest.mark.parametrize(("reason", "was_killed"), [(TIME, False), (MEMORY, True), (FAILED, False)])
def test_a_child_that_dies_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, was_killed: bool
) -> None:
    def die(*_: object, **limits: object) -> None:
        raise ChildDied(reason, "its last line")

    monkeypatch.setattr("memory.probe.call", die)
    result = probe(request_of(), tmp_path)
    assert result.failed and result.was_killed is was_killed
    assert not list(tmp_path.rglob("*.json")), "a failure is not kept"


def test_a_broken_entry_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of()
    place = tmp_path / "probes" / f"{fingerprint(request)}.json"
    place.parent.mkdir()
    place.write_text("{")
    answer = {"base_bytes": 1, "phases": {"step": 5}, "step_seconds": 0.5}
    monkeypatch.setattr("memory.probe.call", lambda *_, **limits: answer)
    assert probe(request, tmp_path).phases == {"step": 5}
    assert probe(request, tmp_path).is_cached
