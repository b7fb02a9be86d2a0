"""What the figures in docs/ stand on: benchmarks give flags that exist, measure what was held, and run a fair peer."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.faults.kill_cases import World
from benchmarks.faults.killed_commands import cases_of
from benchmarks.finetuning import KINDS, Case, measure, ours_words
from benchmarks.parts import children, finetuning_data, large_inputs
from benchmarks.parts.finetuning_data import Setting
from benchmarks.parts.rows import write_rows
from benchmarks.recipes import RECIPES, SEED_RECIPES, seed_table, summary
from benchmarks.throughput import Work
from devices.processor import CLASSES
from settings.loading import load
from settings.precedence import model_presets

MIB = 1024**2


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Setting]:
    """A comparison of finetuning whose files are made."""
    folder = tmp_path_factory.mktemp("finetuning")
    rows = [{"prompt": f"question {n} " * (1 + n % 3), "response": f"answer {n} " * (1 + n % 4)} for n in range(40)]
    write_rows(folder / "pairs.jsonl", rows)
    made = Setting("tiny", str(folder / "pairs.jsonl"), rows=4, steps=2, source=32, target=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetuning_data, "ROOT", folder)
        made.make()
        yield made


def flags_of(words: Iterable[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def test_flags_are_those_of_the_commands(setting: Setting, tmp_path: Path) -> None:
    for case in cases_of(World(tmp_path)):
        command, *flags = case.words(tmp_path)
        load(command, flags_of(flags))
    for flags_of_case in large_inputs.cases(tmp_path, tmp_path, "a boat").values():
        flags_alone = {name: str(value) for name, value in flags_of_case.items() if name not in ("command", "client")}
        load(flags_of_case["command"], flags_alone)
    for kind in KINDS:
        _, command, *flags = ours_words(Case("ours", kind, "ultra"), setting)
        assert load(command, flags_of(flags)).memory.memory_mode == "ultra"
    for recipe in RECIPES:
        assert load("train", {"preset": f"recipe_{recipe}"}).data.objective == "pairs"
    for recipe, score in SEED_RECIPES.items():
        config = load("train", {"preset": f"recipe_{recipe}"})
        assert config.train.metric_for_best == score
        assert config.model.is_text == (recipe == "akkadian")


def test_a_table_of_seeds_shows_scores_of_answers_in_percent() -> None:
    run = {
        "seed": 1,
        "loss": 2.5,
        "bleu": 40.04,
        "chrf++": 52.12,
        "geometric_mean": 45.68,
        "weights": 8_900_000,
        "steps": 10,
    }
    took = {"seconds": 60.0, "peak_bytes": MIB, "planned_peak_bytes": MIB}
    shown = seed_table("akkadian", [{**run, **took}, {**run, **took, "seed": 2, "geometric_mean": 45.28}])
    assert "validation: 45.5." in shown and "| 1 | 45.7 | 40.0 | 52.1 | 2.5000 | 8.9M |" in shown


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_sums_up_every_recipe(tmp_path: Path, recipe: str) -> None:
    scores = ["wer"] if recipe.startswith("g2p") else RECIPES[recipe].split(",")
    side = {"peak_bytes": MIB, "seconds": 60.0, **dict.fromkeys(scores, 45.5)}
    rows = summary(recipe, {"ours": side, "peer_equal_time": side})
    table = "\n".join(["| a | b |", "| --- | --- |", *("| 1 | 2 |" for _ in range(20))])
    content = {
        "when": "2026-11-26, here",
        "heading": f"Recipe: {recipe}",
        "text": table,
        "summary": rows,
        "figures": {},
    }
    (tmp_path / "fp32-products").mkdir()
    (tmp_path / "fp32-products" / f"recipe-{recipe}.json").write_text(json.dumps(content))
    text = page.page_of(tmp_path)
    assert f"recipe {recipe}, {scores[0]} | 45.5 in 1 min | 45.5 in 1 min | fp32-products |" in text
    assert f"# Quality\n\n## Recipe: {recipe}\n\n2026-11-26, here" in text
    assert "all 20 rows" in text


def test_functions_that_are_killed_inside_are_there(tmp_path: Path) -> None:
    places = [place for case in cases_of(World(tmp_path)) for place in case.timed]
    assert len(places) > 10
    for place in places:
        module, _, name = place.partition(":")
        assert callable(functools.reduce(getattr, name.split("."), importlib.import_module(module))), place


@pytest.mark.skipif(sys.platform != "linux", reason="the high water mark is read from /proc")
def test_memory_is_what_the_child_held() -> None:
    child = children.run(["-c", "import time; x = bytearray(b'1') * (300 << 20); time.sleep(0.5); print('done')"])
    assert child.output == "done\n" and child.failure == ""
    assert 300 * MIB < child.peak_bytes < 360 * MIB
    assert child.peak_bytes < child.high_water_bytes < 400 * MIB, "pages of files come on top"
    assert children.run(["-c", "raise ValueError('too wide')"]).failure == "ValueError: too wide"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT calls what transformers renamed
def test_the_peer_accumulates_exactly_and_trains_what_it_says(setting: Setting, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    from benchmarks.parts.finetuning_peer import build, run_step

    rows = json.loads((setting.folder / "batches.json").read_text(encoding="utf8"))[0]
    base = shutil.copytree(setting.folder / "base", tmp_path / "base")
    facts = json.loads((base / "config.json").read_text())
    assert facts["dropout_rate"] == 0.1, "as T5 ships"
    (base / "config.json").write_text(json.dumps({**facts, "dropout_rate": 0.0}))
    gradients = []
    for batch_size, recompute in ((4, False), (1, True)):
        model = build("frozen", recompute, str(base))
        run_step(model, torch.optim.SGD(model.parameters(), lr=0.0), rows, batch_size)
        gradients.append({name: w.grad for name, w in model.named_parameters() if w.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and all(name.startswith("decoder.") for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5)
    adapted = build("lora", True, str(base))
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert trained and all("lora_" in name and (".q." in name or ".v." in name) for name in trained)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("ours", "full", "ultra"), Case("peer", "lora", "1c")])
def test_a_system_runs(setting: Setting, case: Case) -> None:
    found = measure(case, setting)
    assert "failed" not in found and len(found["losses"]) == 2 and found["peak_bytes"] > 100 * MIB


@pytest.mark.slow
def test_work_is_counted_as_torch_counts_it() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(**model_presets()["tiny"], decoder_start_token_id=0, use_cache=False))
    ids = torch.arange(40).view(2, 20)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids[:, :16].contiguous(), labels=ids[:, 16:].contiguous()).loss.backward()
    assert Work("tiny", 2, 16, 4).flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_page_is_what_its_figures_say() -> None:
    assert page.PAGE.read_text(encoding="utf8") == page.page_of(page.FIGURES)
    classes = {path.name for path in page.FIGURES.iterdir()}
    known = {name.replace(" ", "-") for name in CLASSES}
    assert all(name in known or name.startswith(("cuda-", "mps-")) for name in classes)


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
@pytest.mark.parametrize("undoes", [False, True])
def test_power_takes_what_was_not_waited_for(tmp_path: Path, undoes: bool) -> None:
    from benchmarks.faults.disk_faults import Fault, start
    from tests.killing import run_child

    disk = tmp_path / "disk"
    disk.mkdir()

    def write(path: Path, is_synced: bool) -> None:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY)
        os.write(handle, b"x")
        if is_synced:
            os.fsync(handle)
        os.close(handle)

    def work() -> None:
        start(Fault("power", 4, below=str(disk), undoes=undoes, log=str(tmp_path / "aside")))
        write(disk / "waited", is_synced=True)  # 0
        write(disk / "not", is_synced=False)
        os.replace(disk / "waited", disk / "old")  # 1
        os.mkdir(disk / "made")  # 2
        write(disk / "made" / "inner", is_synced=True)  # 3
        os.rename(disk / "not", disk / "renamed")  # 4

    (disk / "old").write_text("old")
    assert run_child(work) == -9
    left = {path.name: path.read_text() for path in disk.rglob("*") if path.is_file()}
    assert left == ({"waited": "x", "old": "old", "not": ""} if undoes else {"old": "x", "inner": "x", "renamed": ""})
