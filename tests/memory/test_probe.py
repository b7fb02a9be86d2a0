"""The probe measures in a child process, agrees with the plan, is kept, and says when it was killed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from memory.estimate.peaks import peak_of, predict
from memory.estimate.shapes import Shapes
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.probe import (
    ProbeRequest,
    ProbeResult,
    correction_of,
    probe,
    read_result,
    write_result,
)
from memory.processes import has_proc
from settings.loading import load
from support.units import GIB, MIB

CHOICE = ExecutionPlan(2, 2, 1, 1, 2, "float32", "float32", 8 * MIB, "small")


def request_of(
    choice: ExecutionPlan = CHOICE, source: int = 128, target: int = 48, limit_bytes: int = 0, **flags: Any
) -> ProbeRequest:
    words = {"train_file": "x", "model_preset": "tiny", "num_threads": 1, **flags}
    config = load("train", {name: str(value) for name, value in words.items()})
    shapes = Shapes.longest(4, source, target)
    steps = tuple(map(tuple, shapes.worst_steps(choice.batch_size_per_gpu)))
    return ProbeRequest(config, choice, steps, ((source, target),) * 2, limit_bytes=limit_bytes)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


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


def test_a_result_is_kept(measured: tuple[ProbeResult, Path]) -> None:
    result, folder = measured
    again = probe(request_of(), folder, time_limit=0.001)  # A second measurement could not end in time.
    assert again == dataclasses.replace(result, is_cached=True, seconds=0.0)


@pytest.mark.parametrize(
    ("changes", "time_limit", "was_killed", "reason"),
    [
        ({}, 0.001, False, "processor time"),
        # It takes as long as a whole measurement; test_child_process.py has children that take too much memory.
        pytest.param({"host_bytes": MIB}, 600.0, True, "memory", marks=pytest.mark.slow),
    ],
)
def test_a_child_that_dies_is_one_sentence(
    changes: dict[str, Any], time_limit: float, was_killed: bool, reason: str, tmp_path: Path
) -> None:
    result = probe(dataclasses.replace(request_of(), **changes), tmp_path, time_limit)
    assert reason in result.failed and "\n" not in result.failed
    assert result.phases is None and result.was_killed is was_killed
    assert not list(tmp_path.rglob("*.json")), "a failure is not kept"


def test_an_entry_that_no_probe_has_written_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "probes" / "entry.json"
    result = ProbeResult(2**28, {"step": 2**29}, 1.5)
    write_result(path, result)
    assert read_result(path) == result
    text = path.read_text()
    changes = (("{", ""), ("536870912", "536870913"), ("536870912", "NaN"), ('"failed": ""', '"more": 1'))
    for damaged in (*(text.replace(*change) for change in changes), "[" * 100_000):
        path.write_text(damaged)
        assert read_result(path) is None
    path = tmp_path / "entry.json" / "below.json"
    path.parent.write_text("a file in place of the folder")
    write_result(path, result)
    assert read_result(path) is None, "a cache that cannot be written is done without"
