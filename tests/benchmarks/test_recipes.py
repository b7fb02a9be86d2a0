"""A recipe of each kind works for a stranger: its script writes a small download's rows, its preset trains on them."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.parts import pronunciation, recipe_data
from benchmarks.parts.rows import read_rows
from settings.declared import ROOT
from settings.loading import load
from trainer_low_mem import LowMemTrainer

pytestmark = pytest.mark.usefixtures("one_thread")
DATA = "data/cache/recipes"  # where the presets read
WORDS = ("file", "image", "server", "library", "network", "protocol", "python", "driver", "sound", "cluster")
SMALL = {
    "num_layers": 1,
    "num_decoder_layers": 1,
    "effective_batch_size": 4,
    "eval_rows": 4,
    "eval_generate_rows": 4,
    "max_steps": 1,
    "warmup_steps": 0,
    "sample_rows": 0,
    "num_threads": 1,
}


def pronounced_words(folder: Path) -> None:
    for part in ("train", "dev"):
        words = (f"{word}{n}\t{' '.join(word)}\n" for n in range(3) for word in WORDS)
        (folder / f"eng_us_{part}.tsv").write_text("".join(words))
    pronunciation.main(["rows", str(folder), str(folder / "g2p_english"), "eng_us"])


def variants(folder: Path) -> None:
    rows = (f"{'MKVLAC' * 12}{'ACDEF'[n % 5]},{n / 8},{('train', 'train', 'test')[n % 3]}," for n in range(30))
    lines = [f"{row}{'True' if number % 3 == 1 else ''}" for number, row in enumerate(rows)]
    with zipfile.ZipFile(folder / "splits.zip", "w") as archive:
        archive.writestr("splits/three_vs_rest.csv", "\n".join(["sequence,target,set,validation", *lines]) + "\n")
    recipe_data.main(["gb1", str(folder), str(folder / "splits.zip")])
    assert len(read_rows(folder / "gb1_test.jsonl")) == len(read_rows(folder / "gb1_valid.jsonl")) == 10


def proteins(folder: Path) -> None:
    names = [f"P{n}" for n in range(30)]
    heads = [f"{name} SET={'test' if n % 3 == 2 else 'train'} VALIDATION={n % 3 == 1}" for n, name in enumerate(names)]
    files = {
        "sequences": "".join(f">{name}\nMKVLAC\nAC\n" for name in reversed(names)),
        "mask": "".join(f">{name}\n01111111\n" for name in names),
        "sampled": "".join(f">{head}\nCEHHEE\nCC\n" for head in heads),
    }
    with zipfile.ZipFile(folder / "splits.zip", "w") as archive:
        for name, text in files.items():
            archive.writestr(f"splits/{name}.fasta", text)
    recipe_data.main(["structure", str(folder), str(folder / "splits.zip")])
    rows = read_rows(folder / "structure_train.jsonl")
    assert rows == [{"sequence": "MKVLACAC", "labels": "CEHHEECC", "mask": "01111111"}] * 10


def purchases(folder: Path) -> None:
    reviews = list[dict[str, Any]]()
    for user in range(20):
        for number in range(6):
            item = f"item{(user + number) % 9}"
            reviews.append({"reviewerID": f"user{user}", "asin": item, "unixReviewTime": 86400 * (number // 2)})
    with gzip.open(folder / "reviews.json.gz", "wt") as file:
        file.write("".join(json.dumps(review) + "\n" for review in reviews))
    recipe_data.main(["recommend", str(folder), str(folder / "reviews.json.gz")])
    rows = {part: read_rows(folder / f"recommend_{part}.jsonl") for part in ("train", "valid", "test")}
    assert [row["response"] for row in rows["train"][:3]] == ["item1", "item2", "item3"]
    assert rows["valid"][0] == {"prompt": "item1 item2 item3", "response": "item4"}
    assert rows["test"][0] == {"prompt": "item2 item3 item4", "response": "item5"}
    assert (folder / "recommend_items.txt").read_text().split() == [f"item{n}" for n in range(9)]


DOWNLOADS: dict[str, Callable[[Path], None]] = {
    "g2p_english": pronounced_words,
    "gb1": variants,
    "structure": proteins,
    "recommend": purchases,
}


QUICK = ("g2p_english", "structure")  # One with answers and one with labels; the others are slow.


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in DOWNLOADS]
)
def test_a_recipe_trains_on_the_rows_of_its_script(recipe: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    DOWNLOADS[recipe](data)
    text = (ROOT / "presets" / f"recipe_{recipe}.yaml").read_text(encoding="utf8")
    settings = yaml.safe_load(text.replace(DATA, str(data)))
    assert str(data) in settings["train_file"], "the preset reads where the page says that scripts write"
    settings.pop("epochs", None)
    # The budget of a preset is for a process of its own, and this one holds what other tests have loaded.
    small = {**SMALL, "memory_budget": "4G"}
    if "head" in settings:
        for name in ("num_decoder_layers", "eval_generate_rows"):
            del small[name]
    preset = tmp_path / "preset.yaml"
    preset.write_text(yaml.safe_dump({**settings, **small}, allow_unicode=True), encoding="utf8")
    places = {name: str(tmp_path / name) for name in ("output_dir", "log_dir", "cache_dir")}
    LowMemTrainer(load("train", {"config": str(preset), "run_name": recipe, **places})).train()
    logs = tmp_path / "log_dir" / recipe / "metrics.jsonl"
    assert logs.is_file() and json.loads(logs.read_text().splitlines()[-1])["event"] == "end"
