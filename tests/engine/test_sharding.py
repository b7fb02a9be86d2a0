"""Weights cut over processes train as whole ones do: losses, weights, and the draws of the rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import must_succeed

CHILD = Path(__file__).with_name("children") / "sharding_child.py"
AHEAD = Path(__file__).with_name("children") / "ahead_child.py"
MEASURED = Path(__file__).with_name("children") / "sharding_memory_child.py"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "t5 float32 adafactor 0"),
        pytest.param(2, "umt5 bfloat16 adafactor 99", marks=slow),
        pytest.param(2, "t5-v1.1 float32 adamw_rms 99", marks=slow),
        pytest.param(2, "t5 bfloat16 adamw_8bit 2", marks=slow),
        pytest.param(2, "t5 float32 muon 0", marks=slow),
        pytest.param(4, "t5 bfloat16 adamw 99", marks=slow),
    ],
)
def test_sharded_training_equals_whole_training(count: int, words: str) -> None:
    must_succeed(CHILD, count, *words.split())


def test_gathering_a_block_ahead_changes_no_bit() -> None:
    must_succeed(AHEAD, 2)


@slow
@pytest.mark.parametrize(
    ("optimizer", "count", "share"), [("adafactor", 2, 0.6), ("adamw_rms", 2, 0.6), ("adamw_rms", 4, 0.35)]
)
def test_a_process_holds_its_share(tmp_path: Path, optimizer: str, count: int, share: float) -> None:
    """Peak of steps, less the process before its model: weights, state, gradients, the gathered block, activations."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs /proc")
    peaks = {}
    for how in ("whole", "sharded"):
        must_succeed(MEASURED, count, how, optimizer, str(tmp_path / how))
        peaks[how] = int((tmp_path / how).read_text())
    (tmp_path / "peaks").write_text(str(peaks))
    assert peaks["sharded"] <= share * peaks["whole"], peaks
