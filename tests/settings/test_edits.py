"""What a user has changed in `config.py`, read from its text, as the guides print it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from settings.declared import GROUPS, settings_by_name
from settings.edits import Edits, Shipped, edits_of_config

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (ROOT / "config.py").read_text("utf8")
LOW_MEMORY = """class TrainConfig:
    batch_size_per_gpu = 1  # 改为1
    gradient_accumulation_steps = 8
    max_seq_len = 256
    mixed_precision = 'no'
"""
SMALL_MODEL = """class T5ModelConfig:
    d_model = 384  # 从512改为384
    d_ff = 1536
    num_layers = 4
    num_heads = 6
"""
COMMENTS_ALONE = "class T5ModelConfig:\n    # 使用默认配置\n"
VALUES = {
    "batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "max_seq_len": 256,
    "mixed_precision": "no",
    "d_model": 384,
    "d_ff": 1536,
    "num_layers": 4,
    "num_heads": 6,
}


def edits(text: str) -> Edits:
    shipped = {
        name: Shipped(GROUPS[group].__name__, member.default)  # type: ignore[union-attr]
        for name, (group, member) in settings_by_name().items()
    }
    return edits_of_config(text.encode("utf8"), {**shipped, "model_preset": Shipped("T5ModelConfig", "tiny")})


def values(text: str) -> dict[str, Any]:
    read = edits(text)
    assert not read.problems
    return {name: edit.value for name, edit in read.by_name.items()}


def class_replaced(text: str, name: str, block: str) -> str:
    """The text with another body for a class."""
    head, _, body = text.partition(f"class {name}:\n")
    assert body
    _, decorator, tail = body.partition("\n\n\n@declared\n")
    return head + block + decorator + tail


def added(text: str, block: str) -> str:
    """The text with the lines of a block at the top of its class."""
    head, _, lines = block.partition("\n")
    assert f"{head}\n" in text
    return text.replace(f"{head}\n", f"{head}\n{lines}", 1)


def in_place(text: str) -> str:
    for name, value in VALUES.items():
        old = next(line for line in text.splitlines() if line.startswith(f"    {name} = "))
        text = text.replace(old, f"    {name} = {value!r}")
    return text


@pytest.mark.parametrize(
    "text",
    [
        in_place(SHIPPED),
        f"{SHIPPED}\n\n{LOW_MEMORY}\n\n{SMALL_MODEL}",
        added(added(SHIPPED, LOW_MEMORY), SMALL_MODEL),
        class_replaced(class_replaced(SHIPPED, "TrainConfig", LOW_MEMORY), "T5ModelConfig", SMALL_MODEL),
        "\ufeff" + in_place(SHIPPED),
        in_place(SHIPPED).replace("d_model = 384", "d_model: int = 6 * 64").replace("'no'", "('no')"),
    ],
)
def test_the_blocks_of_the_guides_act(text: str) -> None:
    assert values(text) == VALUES


def test_the_file_as_it_came_is_no_edit_and_a_class_of_comments_keeps_the_defaults() -> None:
    assert values(SHIPPED) == {}
    assert values(f"{SHIPPED}\n{COMMENTS_ALONE}") == {}
    assert values(class_replaced(SHIPPED, "T5ModelConfig", COMMENTS_ALONE)) == {}
    assert values("") == {}


def test_a_default_that_somebody_writes_down_is_an_edit() -> None:
    assert values("class T5ModelConfig:\n    d_model = 512\n") == {"d_model": 512}
    assert values(f"{SHIPPED}\nclass TrainConfig:\n    max_seq_len = 512\n") == {"max_seq_len": 512}
    assert values(f"WIDTH = 64\n{SHIPPED}\nclass T5ModelConfig:\n    d_model = 2 * WIDTH\n") == {"d_model": 128}


def test_the_line_of_an_edit_is_known() -> None:
    text = SHIPPED.replace("    d_model = 512", "    d_model = 384")
    line = 1 + text.splitlines().index("    d_model = 384  # hidden size")
    assert edits(text).by_name["d_model"].line == line
    problem = edits(f"{COMMENTS_ALONE}class TrainConfig:\n    learn_rate = 3\n").problems
    assert len(problem) == 1 and "4" in problem[0] and "learn_rate" in problem[0]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("class TrainConfig:\n    batch_size_per_gpus = 1", "batch_size_per_gpu"),
        ("class T5ModelConfig:\n    max_seq_len = 256", "DataConfig"),
        ("d_model = 384", "T5ModelConfig"),
        ("class TrainConfig:\n    max_steps = open('x')", "max_steps"),
        ("class T5ModelConfig:\n    d_model += 2", "d_model"),
        ("class T5ModelConfig:\n    d_model: 384", "d_model = 384"),
        ("class TrainConfig:\n    max_steps：int = 3", "config.py"),
    ],
)
def test_what_cannot_act_is_one_sentence_with_its_line(line: str, hint: str) -> None:
    (problem,) = edits(f"{SHIPPED}\n\n{line}\n").problems
    number = len(SHIPPED.splitlines()) + 2 + len(line.splitlines())
    lines = {str(number), str(number - 1)} if hint == "config.py" else {str(number)}
    assert hint in problem and any(f"config.py line {count}:" in problem for count in lines)


def test_a_file_in_another_encoding_is_named() -> None:
    assert "UTF-8" in edits_of_config(SHIPPED.replace("hidden size", "改为").encode("gbk"), {}).problems[0]
