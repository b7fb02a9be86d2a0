"""What a user can get wrong: exit code 2, a message that names it and says what to do, and nothing half written.

Every line below is a command line of its own. Starting Python and importing torch takes seconds, so that one child
process runs them all, one after the other, through the program's own `main`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.running import ENVIRONMENT, ROOT, Place
from tests.end_to_end.world import SHAPE, World

RUN_ALL = """
import contextlib, io, json, sys
import train_low_mem
results = {}
for name, arguments in json.load(sys.stdin).items():
    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf8", write_through=True)
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        code = train_low_mem.main(arguments)
    results[name] = [code, screen.buffer.getvalue().decode("utf8")]
print(json.dumps(results))
"""
# name -> command line and what the message says; {data} {runs} {model} {file} are folders and files of the test
BAD: dict[str, tuple[list[str], list[str]]] = {
    "empty file": (["train", "--train_file={data}/empty.jsonl"], ["empty.jsonl", "is empty"]),
    "cut Parquet": (["train", "--train_file={data}/cut.parquet"], ["cut.parquet"]),
    "broken line": (["train", "--train_file={data}/broken.jsonl"], ["broken.jsonl", "line 3", "skip_bad_rows"]),
    "no tokenizer": (["train", "--train_file={data}/good.jsonl", "--tokenizer_dir={data}"], ["--tokenizer_dir"]),
    "checkpoint of another shape": (
        ["train", "--train_file={data}/good.jsonl", "--finetune_from={model}", "--d_model=64"],
        ["--d_model = 64", "different shape (32)"],
    ),
    "a device as data": (["train", "--train_file=/dev/null"], ["--train_file = /dev/null, is not an ordinary file"]),
    "cut weights": (["generate", "--model={data}/cut_weights", "--input=a"], ["model.safetensors"]),
    "no model": (["generate", "--model=nowhere", "--input=a"], ["--model = nowhere, no such folder"]),
    "unwritable output": (
        ["train", "--train_file={data}/good.jsonl", "--output_dir={file}/runs"],
        ["--output_dir", "is a file"],
    ),
    "unwritable answers": (
        ["generate", "--model={model}", "--input=a", "--output={file}/answers.jsonl"],
        ["--output", "cannot be written"],
    ),
    "run name that exists": (
        ["train", "--train_file={data}/good.jsonl", "--output_dir={runs}", "--run_name=whole"],
        ["--run_name = whole, exists", "--is_keep_training=True", "--overwrite=True"],
    ),
    "nothing to resume": (["train", "--is_keep_training=True"], ["--is_keep_training = True", "no run"]),
    "resuming another shape": (
        ["train", "--is_keep_training=True", "--output_dir={runs}", "--d_model=64", "--seed=6"],
        ["2 problems", "--d_model = 64, the run to resume has 32", "--seed = 6"],
    ),
}  # fmt: skip


def write_bad_data(data: Path, model: Path) -> None:
    data.mkdir()
    (data / "nothing").mkdir()
    (data / "empty.jsonl").write_text("")
    (data / "blank.txt").write_text("\n  \n\n")
    (data / "torn.jsonl").write_text('{"text": "a\n' * 20)
    (data / "cut.parquet").write_bytes(b"PAR1" + bytes(5000))
    (data / "text.parquet").write_text("no table at all\n")
    good = [json.dumps({"text": f"row {number} about a river"}) for number in range(50)]
    (data / "good.jsonl").write_text("\n".join(good) + "\n")
    (data / "broken.jsonl").write_text("\n".join([*good[:2], '{"text": "a', *good[2:]]) + "\n")
    (data / "columns.jsonl").write_text('{"first": "a", "second": "b"}\n')
    (data / "cut_weights").mkdir()
    for path in model.iterdir():
        if path.is_file():
            (data / "cut_weights" / path.name).write_bytes(path.read_bytes())
    weights = data / "cut_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


@pytest.fixture(scope="module")
def refusals(pretrained: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, dict[str, tuple[int, str]]]:
    """The outcome of every line: name -> exit code and screen."""
    folder = tmp_path_factory.mktemp("refused")
    place, runs = Place(folder, folder / "cache"), pretrained.place.runs
    write_bad_data(folder / "data", runs / "whole")
    (folder / "file").write_text("in the way")
    names = {"data": folder / "data", "runs": runs, "model": runs / "whole", "file": folder / "file"}
    lines = {}
    for name, (arguments, _) in BAD.items():
        written = [argument.format(**names) for argument in arguments]
        own = place.command(written[0])[2:]
        given = {argument.split("=")[0] for argument in written}
        shape = (
            [flag for flag in SHAPE if "max_steps" not in flag] if "--finetune_from={model}" not in arguments else []
        )
        shape = shape if written[0] == "train" and "--is_keep_training=True" not in written else []
        lines[name] = [*written, *(flag for flag in [*own, *shape] if flag.split("=")[0] not in given)]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps(lines), cwd=folder,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return place, {name: tuple(result) for name, result in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_by_name(refusals: tuple[Place, dict[str, tuple[int, str]]], name: str) -> None:
    code, screen = refusals[1][name]
    assert code == 2, screen
    assert "Traceback" not in screen and "unexpected" not in screen
    for part in BAD[name][1]:
        assert part in screen


def test_refused_runs_leave_nothing(refusals: tuple[Place, dict[str, tuple[int, str]]], pretrained: World) -> None:
    place, _ = refusals
    assert not place.runs.exists() and not place.logs.exists()
    assert not [path for path in place.cache.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    assert sorted(path.name for path in pretrained.place.runs.iterdir() if path.name.startswith("pretrain")) == []
    assert (place.folder / "file").read_text() == "in the way"


def test_broken_rows_are_counted_where_that_is_asked_for(pretrained: World, tmp_path: Path) -> None:
    write_bad_data(tmp_path / "data", pretrained.place.runs / "whole")
    source = f"--train_file={tmp_path / 'data' / 'broken.jsonl'}"
    place = Place(tmp_path, tmp_path / "cache")
    told = place.do("prepare", source, "--skip_bad_rows=True", f"--tokenizer_dir={pretrained.place.runs / 'whole'}")
    assert "bad rows" in told.stdout and " 1" in next(line for line in told.stdout.splitlines() if "bad rows" in line)
