"""A transcript: command lines with their exit code and what the screen must name.

Starting Python and importing torch takes seconds, so that one child process runs all lines, one after the other,
through the program's own `main`, and reads their files itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests import warm
from tests.end_to_end.running import ENVIRONMENT, ROOT, Place
from tests.end_to_end.world import SHAPE, World

RUN_ALL = """
import contextlib, io, json, sys
import train_low_mem
from data.prepare import looking
from tests.conftest import Reader
looking.Worker = Reader
results = []
for arguments in json.load(open(sys.argv[1], encoding="utf8")):
    out, screen = (io.TextIOWrapper(io.BytesIO(), encoding="utf8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(screen):
        try:
            code = train_low_mem.main(arguments)
        except SystemExit as exit:
            code = exit.code
    looking.forget()
    results.append([code, *(stream.buffer.getvalue().decode("utf8") for stream in (out, screen))])
print(json.dumps(results))
"""
LINES = yaml.safe_load(Path(__file__).with_name("transcript.yaml").read_text("utf8"))


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


Outcome = tuple[int, str, str]


@pytest.fixture(scope="module")
def place(world: World, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder in which all lines run."""
    folder = tmp_path_factory.mktemp("transcript")
    write_bad_data(folder / "data", world.path("whole"))
    (folder / "file").write_text("in the way")
    return Place(folder, folder / "cache")


def fill(text: str, world: World, place: Place) -> str:
    """A text with the paths that it names in braces."""
    paths = {
        "data": place.folder / "data",
        "runs": world.place.runs,
        "model": world.path("whole"),
        "file": place.folder / "file",
    }
    for name, path in paths.items():
        text = text.replace(f"{{{name}}}", str(path))
    return text


@pytest.fixture(scope="module")
def outcomes(world: World, place: Place) -> list[Outcome]:
    """Exit code, standard output and standard error of every line."""
    lines = []
    for row in LINES:
        words = fill(row["line"], world, place).split()
        names = {word.split("=")[0] for word in words}
        own = place.command(words[0])[2:] if words[:1] == ["train"] or words[:1] == ["prepare"] else []
        is_new = words[:1] == ["train"] and not names & {"--finetune_from", "--is_keep_training", "--model_preset"}
        shape = SHAPE if is_new and "--train_file" in names else ()
        lines.append([*words, *(flag for flag in (*own, *shape) if flag.split("=")[0] not in names)])
    words = place.folder / "lines.json"
    words.write_text(json.dumps(lines), encoding="utf8")
    done = warm.run(RUN_ALL, [str(words)], {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, place.folder)
    assert done.returncode == 0, done.stderr
    return [tuple(outcome) for outcome in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize("number", range(len(LINES)), ids=[row["line"] or "nothing" for row in LINES])
def test_a_line_of_the_transcript(world: World, place: Place, outcomes: list[Outcome], number: int) -> None:
    row, (code, out, error) = LINES[number], outcomes[number]
    screen = out + error
    assert code == row["code"], screen
    assert code == 0 or "{" in row["line"] or out == "", "a mistake that is typed leaves standard output alone"
    if "bad rows" in row["names"]:
        assert " 1" in next(line for line in screen.splitlines() if "bad rows" in line)
    assert "Traceback" not in screen
    assert "unexpected" not in screen or any("unexpected" in name for name in row["names"])
    for name in row["names"]:
        assert fill(name, world, place) in screen


def test_refused_lines_leave_nothing(world: World, place: Place, outcomes: list[Outcome]) -> None:
    assert not place.runs.exists() and not place.logs.exists()
    assert not [path for path in place.cache.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    assert not [path.name for path in world.place.runs.iterdir() if path.name.startswith("pretrain")]
    assert (place.folder / "file").read_text() == "in the way"
