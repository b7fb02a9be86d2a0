"""`doctor` always comes to its end: with torch, without it, with a model, for people and for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import doctor
from memory.machines import this_machine
from settings.loading import load
from tests.commands.diagnosis.reports import CPU, GIB, GPU, NO_GPU, report, trial

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_tables_hold_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    known = report(
        devices=[NO_GPU, GPU, CPU], model="t5-small", budget_bytes=2 * GIB, environment={"OMP_NUM_THREADS": "1"},
        trials=[trial(), trial(label="64", outcome="killed", measured_bytes=None, seconds=None)], advice=["take care"],
    )  # fmt: skip
    doctor._show_machine(known)
    doctor._show_findings(known)
    text = capsys.readouterr().out
    for words in ("16.00 GiB, 12.00 GiB available", "OMP_NUM_THREADS=1", "120 T", "20.00 GiB of 24.00 GiB free", "this build of torch", "LoRA rank 64", "killed", "2.00 GiB", "take care"):  # fmt: skip
        assert words in text, words
    assert text.index("this build of torch") > text.index("120 T")  # what is missing comes below the table


def test_a_model_is_tried_only_where_it_is_named_and_an_interruption_shows_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, shown = {"torch": report()["torch"], "devices": [CPU]}, list[str]()
    monkeypatch.setattr(doctor, "call", lambda f, config, measures, **_: (found, this_machine() if measures else None))

    def stopped(trials: object, machine: object, tell: Callable[[str], object]) -> Iterator[dict[str, Any]]:
        shown.append(capsys.readouterr().out)
        yield trial("step", "as planned", measured_bytes=2 * GIB)
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run_trials", stopped)
    doctor.doctor(load("doctor", {"json": "True", "output_dir": str(tmp_path)}))
    assert json.loads(capsys.readouterr().out)["trials"] == []
    with pytest.raises(KeyboardInterrupt):
        doctor.doctor(load("doctor", {"model_preset": "tiny", "output_dir": str(tmp_path)}))
    after = capsys.readouterr().out
    assert "this machine" in shown[0] and "this machine" not in after and "step as planned" in after
    with pytest.raises(KeyboardInterrupt):
        doctor.doctor(load("doctor", {"json": "True", "model_preset": "tiny", "output_dir": str(tmp_path)}))
    content = json.loads(capsys.readouterr().out)
    assert content["model"] == "tiny" and content["trials"][0]["measured_bytes"] == 2 * GIB


def run_doctor(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "doctor", *flags]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


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
    done = run_doctor(tmp_path, "--model_preset=tiny", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "ImportError: libtorch_cpu.so: cannot open" in done.stdout and "RAM" in done.stdout


def test_a_device_that_is_not_here_is_told_where_a_model_shall_be_measured(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--model_preset=tiny", "--device=mps")
    assert done.returncode == 2 and "--device = mps" in done.stderr


@pytest.mark.slow
def test_the_command_measures_a_model(tmp_path: Path) -> None:
    shape = ("--d_model=64", "--d_ff=128", "--num_heads=2", "--vocab_size=512")
    done = run_doctor(tmp_path, "--model_preset=tiny", *shape, "--max_seq_len=32", "--effective_batch_size=4")
    assert done.returncode == 0, done.stderr
    for words in ("step as planned", "sequence length 16", "LoRA rank 4", "tokens/s"):
        assert words in done.stdout
