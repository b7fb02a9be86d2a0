"""`doctor` always comes to its end: with torch, without it, with a model, for people and for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ("--model_preset=tiny", "--d_model=64", "--d_ff=128", "--num_heads=2", "--vocab_size=512", "--max_seq_len=32")


def run_doctor(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "doctor", *flags]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_torch_that_cannot_be_imported_is_advice_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    done = run_doctor(tmp_path, "--model_preset=tiny", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "ImportError: libtorch_cpu.so: cannot open" in done.stdout and "RAM" in done.stdout


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
