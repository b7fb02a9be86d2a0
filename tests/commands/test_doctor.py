"""`doctor` always comes to its end: with torch, without it, with a model, at any width, for people and for programs."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from commands import doctor
from commands.diagnosis.page import print_report
from commands.diagnosis.trials import Result
from commands.doctor import look_at_devices, machine_of
from config import UserError, load
from memory.machines import this_machine
from tests.commands.diagnosis.reports import CPU, GIB, GPU, NO_GPU, report, trial

ROOT = Path(__file__).resolve().parent.parent.parent
LONG = "killed by the system for its memory"
FULL = {
    "devices": [NO_GPU, GPU, CPU], "model": "t5-small", "budget_bytes": 2 * GIB, "environment": {"OMP_NUM_THREADS": "1"},
    "trials": [trial("step", "as planned"), trial(), trial(label="64", outcome=LONG, measured_bytes=None, seconds=None)],
    "advice": ["plain words that go on for so long that they do not fit on one line of any terminal, whatever its width is"],
}  # fmt: skip


def printed(width: int, **changes: object) -> str:
    stream = io.StringIO()
    print_report(report(**{**FULL, **changes}), Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_and_holds_everything(width: int) -> None:
    text = printed(width)
    assert max(len(line) for line in text.splitlines()) <= width
    flat = re.sub(r"\s+", " ", text)
    for words in (
        "16.00 GiB, 12.00 GiB available", "available RAM: 12.00 GiB (binds)", "OMP_NUM_THREADS=1", "120 T", "900 G",
        "cuda is missing: this build of torch has no CUDA", "micro-batch 64", "500",
        "budget 2.00 GiB", "20.00 GiB of 24.00 GiB free" if width > 80 else "NVIDIA", "plain words that go on",
    ):  # fmt: skip
        assert words in flat, words
    assert LONG in flat or all(word in flat for word in LONG.split())


def test_nothing_is_cut_off() -> None:
    assert "…" not in printed(80) and "..." not in printed(80)


def test_a_machine_without_torch_still_has_its_page() -> None:
    text = printed(80, torch={}, devices=[], trials=[], problem="ImportError", advice=[])
    assert "16.00 GiB" in text and "nothing stands out" in text


def test_devices_are_asked_in_a_child_and_its_failure_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "START", "raise ImportError('libtorch is missing')")
    assert look_at_devices() == ({}, "ImportError: libtorch is missing")
    monkeypatch.setattr(doctor, "START", "import os; os._exit(9)")
    assert look_at_devices() == ({}, "its process ended with exit code 9")
    monkeypatch.setattr(doctor, "START", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "DEVICE_SECONDS", 0.2)
    assert "did not answer" in look_at_devices()[1]


def test_the_plan_gets_the_class_of_the_device_that_a_run_would_take() -> None:
    config = load("doctor", {"memory_budget": "8G"})
    on_cpu = machine_of(config, [NO_GPU, CPU])
    assert (on_cpu.rate("bfloat16"), on_cpu.as_measured().rate("bfloat16")) == (1e12, 1.2e12)
    assert on_cpu.speed_class == "amx_bf16"
    assert on_cpu.base_bytes == this_machine().base_bytes
    on_gpu = machine_of(config, [GPU, CPU])
    assert (on_gpu.rate("float32"), on_gpu.budget_bytes, on_gpu.base_bytes) == (4e13, 8 * GIB, 0)
    assert on_gpu.as_measured().rate("float32") == 3e13
    assert (on_cpu.as_measured().rate("float16"), on_gpu.rate("float16")) == (0.0, 9e13), "where it can be trained in"
    assert on_cpu.host_bytes == 0 < on_gpu.host_bytes
    assert machine_of(load("doctor", {}), [GPU, CPU]).budget_bytes == 20 * GIB
    with pytest.raises(UserError, match="--device = mps, is not here; here: cpu"):
        machine_of(load("doctor", {"device": "mps"}), [NO_GPU, CPU])


def test_a_model_is_tried_only_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = {"torch": report()["torch"], "devices": [CPU]}
    monkeypatch.setattr(doctor, "look_at_devices", lambda requested: (devices, ""))
    monkeypatch.setattr(
        doctor, "run_trials", lambda trials, machine, tell: iter([Result("step", "as planned", GIB, 2 * GIB)])
    )
    doctor.doctor(load("doctor", {"json": "True", "output_dir": str(tmp_path)}))
    assert json.loads(capsys.readouterr().out)["trials"] == []
    flags = {"json": "True", "model_preset": "tiny", "output_dir": str(tmp_path)}
    doctor.doctor(load("doctor", flags))
    content = json.loads(capsys.readouterr().out)
    assert content["model"] == "tiny" and content["trials"][0]["measured_bytes"] == 2 * GIB
    assert any("100% too low" in sentence for sentence in content["advice"])


def test_the_machine_is_shown_before_a_model_is_tried_and_an_interruption_shows_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = {"torch": report()["torch"], "devices": [CPU]}
    monkeypatch.setattr(doctor, "look_at_devices", lambda requested: (devices, ""))
    shown: list[str] = []

    def stopped(trials: object, machine: object, tell: Callable[[str], object]) -> Iterator[Result]:
        shown.append(capsys.readouterr().out)
        yield Result("step", "as planned", GIB, 2 * GIB)
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run_trials", stopped)
    with pytest.raises(KeyboardInterrupt):
        doctor.doctor(load("doctor", {"model_preset": "tiny", "output_dir": str(tmp_path)}))
    after = capsys.readouterr().out
    assert "this machine" in shown[0] and "advice" not in shown[0] and "this machine" not in after
    assert "step as planned" in after and "100% too low" in re.sub(r"\s+", " ", after)


def run_doctor(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "doctor", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_examines_this_machine(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["problem"] == "" and content["torch"]["threads"] >= 1
    (cpu,) = [device for device in content["devices"] if device["name"] == "cpu"]
    assert cpu["rates"]["float32"] > 1e8 and cpu["copy_rate"] > 1e7
    assert list(tmp_path.iterdir()) == []


def test_a_torch_that_cannot_be_imported_is_advice_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "doctor", "--model_preset=tiny"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch cannot be used: ImportError: libtorch_cpu.so: cannot open" in done.stdout and "RAM" in done.stdout


@pytest.mark.slow
def test_the_command_measures_a_model(tmp_path: Path) -> None:
    shape = ("--d_model=64", "--d_ff=128", "--num_heads=2", "--vocab_size=512")
    done = run_doctor(tmp_path, "--model_preset=tiny", *shape, "--max_seq_len=32", "--effective_batch_size=4")
    assert done.returncode == 0, done.stderr
    for words in ("step as planned", "sequence length 16", "micro-batch 4", "tokens/s"):
        assert words in done.stdout
