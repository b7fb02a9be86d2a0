"""The study of quality: its table, its verdict, its sweep, and that finished runs are not run again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality
from benchmarks.parts import quality_page, results
from benchmarks.quality import (
    REFERENCE,
    TIERS,
    Runs,
    Study,
    amount,
    bytes_per_weight,
    read_metrics,
    thinned,
    tuned_rate,
)
from config import load
from optimizers import OPTIMIZERS

SMALL, NEAREST = TIERS[4], TIERS[-1]


def run(tier: str, seed: int, loss: float, size: float) -> dict[str, Any]:
    return {
        "tier": tier, "seed": seed, "loss": loss, "bytes_per_weight": size, "compute": "float32", "learning_rate": 0.01,
        "tokens_per_second": 1000.0, "evaluations": [(0, 9.0), (5, 6.0), (10, loss)],
    }  # fmt: skip


RESULTS = [
    run(REFERENCE.name, 0, 4.0, 12), run(REFERENCE.name, 1, 5.0, 12), run(SMALL.name, 0, 4.02, 2.1),
    run(SMALL.name, 1, 5.0, 2.1), run(NEAREST.name, 0, 4.4, 2.0), run(NEAREST.name, 1, 5.5, 2.0),
    run("bf16 stochastic, adamw", 0, math.nan, 10),
]  # fmt: skip


def test_every_optimizer_is_judged_and_every_rounding() -> None:
    assert {tier.optimizer for tier in TIERS if tier.bf16_rounding == "stochastic"} == set(OPTIMIZERS)
    assert {tier.bf16_rounding for tier in TIERS} == {"stochastic", "compensated", "nearest"}


def test_table_and_verdict() -> None:
    lines = quality_page.table(RESULTS, REFERENCE.name).splitlines()
    small, nearest, diverged = lines[3], lines[4], lines[5]
    assert "4.5100" in small and "+0.25% (+0.00 to +0.50)" in small and "2.10" in small
    assert "+10.00% (+10.00 to +10.00)" in nearest and "4.4000-5.5000" in nearest
    assert "diverged" in diverged and diverged.endswith("| - |")
    assert lines[2].endswith("| 100% of the tokens |") and small.endswith("| - |"), "one of its seeds never came there"
    assert SMALL.name in quality_page.verdict(RESULTS, REFERENCE.name), "nearest is smaller, but not within 1%"


def test_page_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    study = {"size": "small", "tokens": 20_000_000, "text": None, "rows": 16, "length": 256}
    quality_page.write_page(study, RESULTS, {}, REFERENCE.name, tmp_path / "page.md")
    picture, link = results.picture_place("quality-small-20M", tmp_path / "page.md")
    assert f"({link})" in (tmp_path / "page.md").read_text(encoding="utf8")
    assert picture.stat().st_size > 10_000

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    raw = (tmp_path / "benchmarks" / results.class_folder() / "quality-small-20M.json").read_text(encoding="utf8")
    assert json.loads(raw, parse_constant=refuse)["figures"]["runs"][-1]["loss"] is None


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_flags_are_the_trainer_s(tier: quality.Tier) -> None:
    flags = Study().flags(tier, 3, None, 20_000_000)
    config = load("train", flags)
    assert (config.train.optimizer, config.memory.mixed_precision) == (tier.optimizer, tier.mixed_precision)
    assert config.train.max_steps == 4882 and config.run.seed == 3


class Child:
    """Stands in for the trainer: writes the metrics of a run whose loss is a function of its learning rate."""

    def __init__(self, best: float) -> None:
        self.best = best
        self.rates: list[Any] = []
        self.names: list[str] = []
        self.diverges = "none"

    def __call__(self, folder: Path, name: str, flags: dict[str, Any]) -> None:
        self.names.append(name)
        rate = flags.get("learning_rate", "auto")
        self.rates.append(rate)
        loss = 4.0 + abs(math.log(rate / self.best)) if isinstance(rate, float) else 4.0
        if self.diverges in name:
            loss = None
        peak = rate if isinstance(rate, float) else 1e-2
        settings = load("train", flags).as_dict()
        events = [
            {"event": "start", "settings": settings},
            {"event": "plan", "choice": {"storage": "bfloat16", "compute": "float32"}},
            {"event": "eval", "step": 0, "loss": 9.0},
            *({"event": "step", "step": n, "loss": 9.0 - n, "learning_rate": peak / n, "tokens": 100, "seconds": 0.5} for n in (1, 2)),
            {"event": "eval", "step": 2, "loss": loss, "rouge_l": 30.0 + flags["seed"]},
        ]  # fmt: skip
        for part in ("logs", "models"):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
        (folder / "logs" / name / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    stand_in = Child(1e-2)
    monkeypatch.setattr(quality, "train", stand_in)
    return stand_in


def study_of_two(folder: Path, **options: str) -> None:
    words = {
        "size": "tiny",
        "tokens": "100k",
        "tiers": SMALL.name,
        "folder": str(folder),
        "page": str(folder / "page.md"),
    }
    quality.main([f"--{name}={value}" for name, value in {**words, **options}.items()])


def shown(folder: Path) -> list[dict[str, Any]]:
    raw = folder / "benchmarks" / results.class_folder() / "quality-tiny-0.1M.json"
    return list(json.loads(raw.read_text(encoding="utf8"))["figures"]["runs"])


def test_finished_runs_are_not_run_again(tmp_path: Path, child: Child) -> None:
    pytest.importorskip("matplotlib")
    study_of_two(tmp_path, seeds="2")
    first = shown(tmp_path)
    assert len(child.rates) == 4 and [run["seed"] for run in first] == [0, 0, 1, 1]
    study_of_two(tmp_path, seeds="3")
    again = shown(tmp_path)
    assert len(child.rates) == 6 and len(again) == 6
    assert first == again[:4]
    assert first[1]["tokens_per_second"] == 200.0 and first[1]["curve"][0] == [1.0, 8.0]


def test_a_study_goes_on_from_its_page_on_another_machine(tmp_path: Path, child: Child) -> None:
    pytest.importorskip("matplotlib")
    study_of_two(tmp_path, seeds="1")
    shutil.rmtree(tmp_path / "tiny-sample-16x256")
    study_of_two(tmp_path, seeds="2")
    assert [("seed1" in name) for name in child.names] == [False, False, True, True]
    shutil.rmtree(tmp_path / "tiny-sample-16x256")
    study_of_two(tmp_path, seeds="1")
    assert len(child.names) == 4 and len(shown(tmp_path)) == 4, "seeds that nobody asked for now stay on the page"
    study_of_two(tmp_path, seeds="1", length="128")
    assert len(child.names) == 6, "a study of other rows is another one"


def test_a_study_in_which_one_diverged_goes_on_from_its_page(tmp_path: Path, child: Child) -> None:
    pytest.importorskip("matplotlib")
    child.diverges = "bf16"
    study_of_two(tmp_path, seeds="1")
    shutil.rmtree(tmp_path / "tiny-sample-16x256")
    study_of_two(tmp_path, seeds="2")
    assert len(child.names) == 4 and "| diverged |" in (tmp_path / "page.md").read_text(encoding="utf8")


def test_each_model_is_finetuned_alike_and_shown(tmp_path: Path, child: Child) -> None:
    pytest.importorskip("matplotlib")
    task = {"finetune": "pairs.jsonl", "held_out": "held.jsonl", "finetune_steps": "7"}
    study_of_two(tmp_path, seeds="2", **task)
    assert len(child.names) == 8 and sum(name.endswith("-finetuned") for name in child.names) == 4
    page = (tmp_path / "page.md").read_text(encoding="utf8")
    assert "| finetuned: loss | to the reference | rouge_l | over seeds |" in page and "| 30.5 | 30.0-31.0 |" in page
    assert not list((tmp_path / "tiny-sample-16x256" / "models").iterdir()), "models are not kept"
    study_of_two(tmp_path, seeds="2", **task)
    assert len(child.names) == 8
    study_of_two(tmp_path, seeds="1", **{**task, "finetune_steps": "9"})
    assert len(child.names) == 12, "another task is another score"
    with pytest.raises(SystemExit, match="is not one score"):
        study_of_two(tmp_path, seeds="1", **task, metric="rouge")
    flags = quality.Task("pairs.jsonl", "held.jsonl", 7).flags(
        Path("base"), Study(task=None).flags(SMALL, 1, None, 10**6)
    )
    config = load("train", flags)
    assert (config.train.optimizer, config.run.seed, config.train.max_steps) == ("adafactor", 1, 7)
    assert config.train.learning_rate == "auto"


def test_what_waits_is_not_begun_when_a_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def fails(folder: Path, name: str, flags: dict[str, Any]) -> None:
        begun.append(name)
        raise SystemExit(3)

    monkeypatch.setattr(quality, "train", fails)
    with pytest.raises(SystemExit):
        quality.main([f"--folder={tmp_path}", f"--page={tmp_path / 'page.md'}", "--jobs=1", "--seeds=2", "--size=tiny"])
    assert len(begun) == 1, "what waited was not begun"
    assert not (tmp_path / "page.md").exists()


@pytest.mark.parametrize("factor", [1.0, 0.1, 9.0])
def test_sweep_ends_where_the_best_has_neighbours(tmp_path: Path, child: Child, factor: float) -> None:
    child.best = factor * OPTIMIZERS["adafactor"].learning_rate
    rate = tuned_rate(Runs(Study(size="tiny", folder=tmp_path)), SMALL, OPTIMIZERS["adafactor"].learning_rate)
    assert rate == pytest.approx(child.best, rel=0.2)
    assert min(child.rates) < rate < max(child.rates) and len(child.rates) <= 5


def test_bytes_a_weight_and_metrics(tmp_path: Path, child: Child) -> None:
    sizes = {}
    for tier in TIERS:
        flags = Study(size="medium").flags(tier, 0, None, 10**6)
        sizes[tier.name] = bytes_per_weight(
            load("train", flags).as_dict(), "float32" if "fp32" in tier.name else "bfloat16"
        )
    assert sizes[REFERENCE.name] == 12 and sizes["bf16 stochastic, adamw_rms"] == 10
    assert 2.0 < sizes["bf16 stochastic, sinkgd"] < sizes[SMALL.name] < 2.1
    assert sizes["bf16 compensated, adafactor"] == pytest.approx(sizes[SMALL.name] + 1)
    child(tmp_path, "run", Study(size="tiny").flags(SMALL, 0, None, 10**6))
    figures = read_metrics(tmp_path / "logs" / "run" / "metrics.jsonl")
    assert figures["loss"] == 4.0 and figures["learning_rate"] == 0.01 and figures["storage"] == "bfloat16"


def test_curves_are_thinned_and_amounts_read() -> None:
    points = list(thinned([(n, float(n)) for n in range(1, 1001)]))
    assert len(points) == quality.CURVE_POINTS and points[0] == (5.5, 5.5)
    assert [amount(text) for text in ("20M", "300k", "1.5G", "77")] == [20_000_000, 300_000, 1_500_000_000, 77]
