"""`doctor` always comes to its end: with torch, without it, with a model, for people and for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands.doctor import examine_devices, show_machine
from settings.errors import UserError
from settings.loading import load
from tests.commands.diagnosis.reports import CPU, GPU, NO_GPU, report
from training.report.progress import Progress

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ("--model_preset=tiny", "--d_model=64", "--d_ff=128", "--num_heads=2", "--vocab_size=512", "--max_seq_len=32")


def run_doctor(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "doctor", *flags]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_tables_hold_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    show_machine(report(devices=[NO_GPU, GPU, CPU], environment={"OMP_NUM_THREADS": "1"}), Progress(1))
    text = capsys.readouterr().out
    for words in ("16.00 GiB, 12.00 GiB available", "OMP_NUM_THREADS=1", "120 T", "20.00 GiB of 24.00 GiB free"):
        assert words in text
    assert text.index("this build of torch") > text.index("120 T"), "what is missing comes below the table"


@pytest.mark.slow
def test_the_command_examines_this_machine(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["problem"] == "" and content["torch"]["threads"] >= 1 and content["model"] is None
    (cpu,) = [device for device in content["devices"] if device["name"] == "cpu"]
    assert cpu["rates"]["float32"] > 1e8 and cpu["copy_rate"] > 1e7
    assert list(tmp_path.iterdir()) == []


def test_a_torch_that_cannot_be_imported_is_advice_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    done = run_doctor(tmp_path, "--model_preset=tiny", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "ImportError: libtorch_cpu.so: cannot open" in done.stdout and "RAM" in done.stdout


def test_a_device_that_is_not_here_is_refused_where_a_model_shall_be_measured() -> None:
    with pytest.raises(UserError, match="--device = mps"):
        examine_devices("mps", load("doctor", {"model_preset": "tiny", "device": "mps"}))


@pytest.mark.slow
def test_a_model_is_planned_and_one_step_of_it_measured(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, *SMALL, "--effective_batch_size=4")
    assert done.returncode == 0, done.stderr
    for words in ("sequence length 16", "LoRA rank 4", "step as planned, measured", "model load", "the prediction"):
        assert words in done.stdout
    done = run_doctor(tmp_path, *SMALL, "--effective_batch_size=4", "--json", "--memory_budget=1G")
    model = json.loads(done.stdout)["model"]
    measured = model["measured"]
    assert 0 < measured["load_bytes"] <= measured["peak_bytes"] <= 1.1 * measured["predicted_bytes"] < 2**30
    assert measured["seconds"] > 0 and measured["outcome"] == "" and len(model["planned"]) == 7
