"""The benchmark on a GPU, run whole on the CPU's way of one: figures of each system, their table, and the page."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import throughput
from benchmarks.gpus import one_system, speed
from benchmarks.gpus.card import watched_card
from benchmarks.gpus.works import PEERS, SYSTEMS, by_default, described, flops_of, tokens_of, works
from benchmarks.parts import children, results
from devices import choose, cuda, ways
from tests.fake_device import FakeDevice

GIB = 2**30


class FakeCard(FakeDevice):
    """A card of 8 GiB with a name and a rate; it counts what tensors take."""

    computes_on = "NVIDIA Test"

    def __init__(self) -> None:
        super().__init__(8 * GIB, name="cuda")

    def multiply_rate(self, dtype: torch.dtype) -> float:
        return 1e12

    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Child processes run in this one, and what they pick is a card that is not there."""

    def run(words: Sequence[str]) -> children.Child:
        device = FakeCard()
        monkeypatch.setattr(one_system, "pick", lambda where: device)
        with capsys.disabled(), ways.taking("cpu", ways.CUDA), device.watched(), pytest.MonkeyPatch.context() as patch:
            printed: list[str] = []
            patch.setattr("builtins.print", lambda text, **_: printed.append(text))
            one_system.main(*words[2:5], int(words[5]))  # type: ignore[call-arg]
        return children.Child(0, "\n".join(printed), "", 1.0, 5 * 2**20, 0)

    monkeypatch.setattr(children, "run", run)
    monkeypatch.setattr(cuda, "why_missing", lambda: "")
    monkeypatch.setattr(speed, "STEPS", 2)


def sections(page: Path) -> list[str]:
    return [line for line in page.read_text(encoding="utf8").splitlines() if line.startswith("<!-- throughput")]


def test_our_modes_from_the_command_to_the_page(card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "PAGE", tmp_path / "benchmarks.md")
    throughput.main(["tiny", "--device=cuda", "--systems=ours-standard,ours-ultra", "--repeats=1"])
    assert sections(results.PAGE) == ["<!-- throughput-tiny on cuda-NVIDIA-Test -->"]
    raw = tmp_path / "benchmarks" / "cuda-NVIDIA-Test" / "throughput-tiny.json"
    standard, ultra = json.loads(raw.read_text())["figures"]
    assert 0 < ultra["peak_bytes"] < standard["peak_bytes"] and standard["compute"] == "float32"
    assert 0.8 < standard["planned_bytes"] / standard["peak_bytes"] < 1.3
    assert len(standard["losses"]) == 5 and standard["losses"][-1] < standard["losses"][0]
    assert ultra["losses"] == pytest.approx(standard["losses"], rel=1e-5)
    text = results.PAGE.read_text(encoding="utf8")
    assert "## tiny: 16 rows of" in text and "(cuda NVIDIA Test)" in text and "| ours-ultra |" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_peers_beside_our_modes(card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "PAGE", tmp_path / "benchmarks.md")
    throughput.main(["tiny", "--device=cuda", "--repeats=1"])
    raw = tmp_path / "benchmarks" / "cuda-NVIDIA-Test" / "throughput-tiny.json"
    runs = {run["system"]: run for run in json.loads(raw.read_text())["figures"]}
    assert list(runs) == list(SYSTEMS) and not [run for run in runs.values() if "failed" in run]
    for name in PEERS:
        assert runs[name]["losses"][0] == pytest.approx(runs["eager"]["losses"][0], rel=0.05)
    # T5's initial values are the same kind in both: a loss near that of guessing, and far above
    assert runs["eager"]["losses"][0] == pytest.approx(runs["ours-standard"]["losses"][0], rel=0.6)
    assert "Bar, " in results.PAGE.read_text(encoding="utf8")


def run(system: str, tokens_per_second: float, peak: float, turn: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "system": system, "turn": turn, "tokens_per_second": tokens_per_second, "peak_bytes": int(peak * GIB), "share": 0.5,
        "held_bytes": int(1.1 * peak * GIB), "outside_bytes": 0, "process_bytes": GIB, "planned_bytes": 0, "compute": "bfloat16",
        "card": "cuda NVIDIA Test", "card_bytes": 80 * GIB, "product_rate": 7e14, "first_seconds": 61.0, **more,
    }  # fmt: skip


def test_a_table_holds_what_failed_and_every_peer() -> None:
    ours = run("ours-standard", 300, 20, planned_bytes=21 * GIB, outside_bytes=30 * GIB)
    lines = speed.table(
        [run("eager", 100, 60), {"system": "fused", "turn": 0, "failed": "no memory"}, ours]
    ).splitlines()
    assert len(lines) == 5 and {line.count("|") for line in lines} == {len(speed.HEAD) + 1}
    assert "| fused | - | no memory |" in lines[3]
    assert "| ours-standard | 300 | 20.00 GiB | +5% | 22.00 GiB | 30.00 GiB | 1.00 GiB | 50% of bfloat16 |" in lines[4]
    assert lines[4].endswith("| 3.00-3.00x at 0.33 of its peak | - | - |")


def test_the_bar_asks_for_speed_and_memory_of_one_mode_in_every_turn() -> None:
    compiled = [run("compiled", 100, 50, turn) for turn in (0, 1)]
    fast, small = [run("ours-standard", 150, 30), run("ours-ultra", 99, 10)], run("ours-low", 101, 19)
    told = speed.notes([*compiled, *fast])
    assert any("61 s" in line for line in told) and "Bar, **missed**: no mode is as fast" in told[-1]
    assert (
        "Bar, kept" in speed.notes([*compiled, *fast, small])[-1]
        and "ours-low at 1.01" in speed.notes([*compiled, small])[-1]
    )
    assert "**missed**" in speed.notes([*compiled, small, run("ours-low", 99, 19, 1)])[-1]
    assert speed.notes([{"system": "eager", "failed": "none"}]) == []


def test_works_are_the_traced_ones() -> None:
    assert by_default("cuda") == ["t5-base", "t5-base-dropout", "t5-base-ragged"] and by_default("mps") == ["t5-small"]
    found = works("cuda")
    assert tokens_of(found["t5-base"]) == 128 * 626 and found["t5-base-dropout"].dropout == 0.1
    assert flops_of(replace(found["t5-base"], lengths=((512, 114),) * 2)) == pytest.approx(
        flops_of(found["t5-base"]) / 64
    )
    assert described("a", found["t5-base"]) == "a: 128 rows of 512 + 114 tokens, one step"
    assert described("b", found["t5-base-ragged"]) == "b: 64 rows of 21-299 + 5-74 tokens, one step"


@pytest.mark.skipif(os.name != "posix", reason="stands in for the driver's tool by a script")
def test_the_card_is_watched_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *loop*) echo 700; echo 2700; echo 900; touch "$TOLD"; sleep 60;; *) echo 500;; esac\n'
    )
    tool.chmod(0o755)
    told = tmp_path / "told"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(told))
    with watched_card("cuda") as seen:
        while not told.exists():
            pass
    assert seen.peak_bytes == 2200 * 2**20
    with watched_card("mps") as seen:
        pass
    assert seen.peak_bytes == 0


def test_a_card_that_is_not_here_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.backends()["cuda"], "why_missing", lambda: "torch finds no driver")
    with pytest.raises(SystemExit, match="--device=cuda: torch finds no driver"):
        throughput.main(["--device=cuda"])
    with pytest.raises(SystemExit, match="unknown: --device=tpu"):
        throughput.main(["--device=tpu"])
    monkeypatch.setattr(choose.backends()["cuda"], "why_missing", lambda: "")
    with pytest.raises(SystemExit, match="unknown: t5-tall, tuned; works are t5-base, "):
        throughput.main(["t5-tall", "--device=cuda", "--systems=tuned"])
    assert sys.modules["benchmarks.gpus.speed"]
