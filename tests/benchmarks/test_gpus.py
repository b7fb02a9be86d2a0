"""The comparison on a GPU, through the same code on a CPU: what it prints, and what it says where it cannot measure."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpus import __main__ as command


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
