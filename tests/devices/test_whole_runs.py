"""A run on a small GPU that is not there: it plans for the card, and an error in the middle of a step changes no
loss.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running import write_text

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.slow
PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import devices
from config import load
from tests.fake_device import FakeDevice
from trainer_low_mem import LowMemTrainer

flavour, refused_step, *flags = sys.argv[1:]
device = FakeDevice(600 * 2**20, flavour or "cuda", name="cpu")  # Accelerate is to take it for a CPU
devices.pick = lambda *names: device
run_step, done = LowMemTrainer._step, []

def step(self, number):
    if str(number) == refused_step and not done:
        done.append(number)
        device.refuse(80)
    return run_step(self, number)

LowMemTrainer._step = step
with device.watched():
    LowMemTrainer(load("train", dict(flag.split("=") for flag in flags))).train()
assert device.used_bytes < 64 * 2**20 and (device.cleanups > 0)
"""
FLAGS = [
    "train_file=text.txt",
    "d_model=32",
    "d_kv=8",
    "d_ff=64",
    "num_heads=4",
    "num_layers=2",
    "num_decoder_layers=2",
    "vocab_size=512",
    "max_seq_len=32",
    "max_steps=4",
    "effective_batch_size=4",
    "mixed_precision=no",
    "sample_rows=0",
    "eval_steps=4",
    "dropout_rate=0.1",
]


def trained(
    folder: Path, name: str, flavour: str = "", refused_step: str = "", *more: str
) -> subprocess.CompletedProcess[str]:
    arguments = [flavour, refused_step, *FLAGS, f"run_name={name}", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def events(folder: Path, name: str, flavour: str = "", refused_step: str = "") -> list[dict[str, Any]]:
    """Train in `folder` and give what metrics.jsonl tells."""
    done = trained(folder, name, flavour, refused_step)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = (folder / "logs" / name / "metrics.jsonl").read_text("utf8").splitlines()
    return [json.loads(line) for line in lines]


def losses(run_events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run_events if event["event"] == "step"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("fake_gpu")
    write_text(folder / "text.txt")
    return folder, events(folder, "whole")


def test_the_plan_is_for_the_card(undisturbed: tuple[Path, list[dict[str, Any]]]) -> None:
    _, run_events = undisturbed
    (plan,) = [event for event in run_events if event["event"] == "plan"]
    assert 500 * 2**20 < plan["budget_bytes"] <= 600 * 2**20
    (end,) = [event for event in run_events if event["event"] == "end"]
    assert 0 < end["measured_peak_bytes"] <= end["planned_peak_bytes"]


@pytest.mark.parametrize("flavour", ["cuda", "cpu"])
def test_an_error_of_any_backend_in_the_middle_of_a_step_changes_no_loss(
    undisturbed: tuple[Path, list[dict[str, Any]]], flavour: str
) -> None:
    folder, whole = undisturbed
    run_events = events(folder, flavour.replace(" ", "_"), flavour, "3")
    assert [event["step"] for event in run_events if event["event"] == "recovery"] == [3]
    assert losses(run_events) == pytest.approx(losses(whole), rel=1e-5)


def test_a_budget_is_refused_that_the_ram_beside_a_device_exceeds(
    undisturbed: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, _ = undisturbed
    done = trained(folder, "small", "", "", "memory_budget=100M")
    assert "DoesNotFit: 100.0 MiB of RAM (memory_budget), is less than the" in done.stderr
