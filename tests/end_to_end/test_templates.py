"""A template goes from the flag through shards and training into the model's folder, and out to another dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SHAPE, World

TEMPLATE = "问：{prompt}\\n答："


def write_talks(path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"word {n}?"}, {"role": "assistant", "content": f"it is {n}"},
                      {"role": "user", "content": "and then?"}, {"role": "assistant", "content": f"then {n + 1}"}]}
        for n in range(40)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path


@pytest.fixture(scope="module")
def talker(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A model that was finetuned on conversations."""
    beside = World(world.beside(tmp_path_factory.mktemp("talker")), world.text, world.pairs)
    talks = write_talks(beside.place.folder / "talks.jsonl")
    done = beside.place.do(
        "train", "--is_finetune=True", f"--train_file={talks}", *SHAPE, "--max_seq_len=48", "--mixed_precision=no",
        "--run_name=talk", "--max_steps=6", "--effective_batch_size=8", f"--prompt_template={TEMPLATE}",
        "--source_prefix=chat: ", "--expand_turns=True", "--sample_rows=2",
    )  # fmt: skip
    (beside.place.folder / "screen.txt").write_text(done.stdout, encoding="utf8")
    return beside


def test_the_model_remembers_its_template(talker: World) -> None:
    stored = json.loads((talker.place.runs / "talk" / "prompt_template.json").read_text("utf8"))
    assert stored == {"prompt_template": "问：{prompt}\n答：", "source_prefix": "chat: ", "turns": True}
    samples = [event for event in talker.place.events("talk") if event["event"] == "sample"]
    assert samples
    for sample in samples:
        assert sample["prompt"].startswith("chat: 问：word") and sample["prompt"].endswith("?\n答：")


def test_the_screen_says_what_to_type_and_what_to_doubt(talker: World) -> None:
    screen = (talker.place.folder / "screen.txt").read_text(encoding="utf8")
    asked = screen.partition("--input='")[2].partition("'")[0]
    assert asked and "chat:" not in asked and "：" not in asked, "generate puts the template around it again"
    assert "only 2 rows held out for evaluation" in screen and "--validation_file" in screen
