"""The comparison on a GPU, through the same code on a CPU: what it prints, and what it says where it cannot measure."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpus import __main__ as command
from benchmarks.gpus.works import HAS_COMPILE, WORKS


@pytest.mark.slow
def test_a_tiny_work_is_measured_and_a_system_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device=cpu", "--systems=ours-standard,ours-ultra", "--steps=1", "--write=False"]
    command.main(["tiny", *flags])
    output = capsys.readouterr().out
    standard, ultra = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert (standard["system"], ultra["system"]) == ("ours-standard", "ours-ultra")
    assert standard["work"] == "tiny" and standard["card"].startswith("cpu ")
    assert len(standard["losses"]) == 4 and standard["losses"][-1] < standard["losses"][0]
    assert ultra["losses"] == pytest.approx(standard["losses"], rel=1e-2)
    assert 0 < ultra["planned_bytes"] < standard["planned_bytes"]
    assert "**tiny**: 16 rows" in output and output.count("| ours-") == 2


def test_a_system_that_does_not_end_in_time_is_a_row_with_the_reason() -> None:
    (run,) = command.measure("ours-standard", ["tiny"], "cpu", steps=1, seconds=0.0)
    assert run["failed"] == "not done in the 0 s of this system"
    assert "failed, because: not done" in command.table([run])


def test_ratios_are_to_the_peers_of_the_same_run() -> None:
    figures = {"best_seconds": 0.1, "gpu_seconds": 0.05, "kernels": 9, "peak_bytes": 2**30, "planned_bytes": 0}
    more = {"first_seconds": 9.0, "tokens_per_second": 100.0}
    runs = [
        {"system": "ours-standard", "seconds": 0.2, **figures, **more},
        {"system": "amp", "seconds": 0.3, **figures, **more},
        {"system": "regional", "failed": "out of memory"},
    ]
    ours = command.table(runs).splitlines()[2]
    assert ours.startswith("| ours-standard | 200.0 (100.0) | 50.0 | 9 | 1.00 GiB |") and ours.endswith("| 1.50x | - |")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(HAS_COMPILE, reason="the setting is there")
def test_a_mode_whose_setting_does_not_exist_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["tiny", "--device=cpu", "--systems=ours-compiled", "--write=False"])
    assert "ours-compiled is left out" in capsys.readouterr().out


def test_the_works_have_the_rows_that_were_measured_before() -> None:
    """So that figures of different versions can be compared."""
    lengths = WORKS["akk128"].lengths
    assert len(lengths) == 128 and sum(map(sum, lengths)) == 13005
    assert len(WORKS["baserag"].lengths) == 64
