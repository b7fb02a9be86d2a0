"""What the figures in docs/ stand on: benchmarks give flags that exist, measure what was held, and run a fair peer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.faults.kill_cases import World
from benchmarks.faults.killed_commands import cases_of
from benchmarks.finetuning import KINDS, Case, ours_words
from benchmarks.parts import finetuning_data, large_inputs
from benchmarks.parts.finetuning_data import Setting
from benchmarks.parts.rows import write_rows
from benchmarks.recipes import RECIPES, SEED_RECIPES
from devices.processor import CLASSES
from settings.loading import load


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
