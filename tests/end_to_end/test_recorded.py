"""Folders that the version before this one has trained still answer, are evaluated and merged; their runs are not
resumed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.record import RECORDED
from tests.end_to_end.running import Place

MODELS = ("whole", "prefix", "pairs", "preferences")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A user's folder with the recorded runs."""
    made = Place(tmp_path, tmp_path / "cache")
    shutil.copytree(RECORDED, made.runs)
    return made


def test_recorded_models_answer(place: Place) -> None:
    for name in MODELS:
        done = place.do("generate", f"--model={place.runs / name}", "--input=river 是什么？", "--max_new_tokens=6")
        assert done.stdout.endswith("\n")
    done = place.do(
        "generate", f"--model={place.runs / 'pairs'}", f"--input={place.runs / 'pairs.jsonl'}", "--output=a.jsonl"
    )
    answers = [json.loads(line)["response"] for line in (place.folder / "a.jsonl").read_text("utf8").splitlines()]
    expected = [json.loads(line)["response"] for line in (place.runs / "pairs.jsonl").read_text("utf8").splitlines()]
    right = sum(answer == reference for answer, reference in zip(answers, expected, strict=True))
    assert right > 0.5 * len(expected), "as when it was trained"


def test_recorded_models_are_evaluated(place: Place) -> None:
    for name, loss in json.loads((RECORDED / "losses.json").read_text()).items():
        rows = f"--validation_file={place.runs / name}.jsonl"
        done = place.do("evaluate", f"--model={place.runs / name}", rows, "--eval_generate_rows=0", "--json=True")
        assert json.loads(done.stdout)["loss"] == pytest.approx(loss, rel=1e-5), name


def test_a_recorded_adapter_is_merged_and_answers_alike(place: Place) -> None:
    adapted = f"--model={place.runs / 'pairs'}", f"--adapter={place.runs / 'lora'}"
    place.do("merge", *adapted, f"--output={place.folder / 'merged'}")
    question = ("--input=the river 3", "--max_new_tokens=6")
    answers = [
        place.do("generate", *which, *question).stdout for which in (adapted, (f"--model={place.folder / 'merged'}",))
    ]
    assert answers[0] == answers[1]


def test_a_recorded_run_is_not_resumed(place: Place) -> None:
    before = _files(place)
    done = place.run("train", "--is_keep_training=True", "--run_name=whole")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3 and "--finetune_from" in done.stderr, done.stderr
    assert _files(place) == before


def _files(place: Place) -> list[str]:
    return sorted(str(path) for path in place.runs.rglob("*") if not path.name.endswith(".lock"))
