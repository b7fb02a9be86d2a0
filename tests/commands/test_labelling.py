"""`generate` with a head over labels: a class, a number, or a label for each word or letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands.answering import find_answering
from commands.evaluate import evaluate
from commands.generate import generate
from settings.errors import UserError
from tests.commands.small import encoder, flags_of, read_rows, write_rows

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["MKVL", "", "ACDEFG", "WW is short"]


def answers(folder: Path, model: Path, rows: list[dict[str, Any]], **flags: Any) -> list[dict[str, Any]]:
    source, output = folder / "texts.jsonl", folder / "answers.jsonl"
    write_rows(source, rows)
    arguments = {
        "model": model,
        "input": source,
        "output": output,
        "mixed_precision": "no",
        "overwrite": True,
        "skip_bad_rows": True,
        **flags,
    }
    generate(flags_of("generate", **arguments))
    return read_rows(output)


def test_answers_are_what_evaluate_predicts(tmp_path: Path) -> None:
    folder = encoder(tmp_path, head="sequence", labels="regression")
    rows = [{"text": text, "label": len(text)} for text in TEXTS if text]
    numbers = [row["number"] for row in answers(tmp_path, folder, rows)]
    arguments = {
        "model": folder,
        "validation_file": tmp_path / "texts.jsonl",
        "output": tmp_path / "out.jsonl",
        "mixed_precision": "no",
        "cache_dir": tmp_path / "cache",
    }
    evaluate(flags_of("evaluate", **arguments))
    predicted = [row["prediction"] for row in read_rows(tmp_path / "out.jsonl")]
    assert numbers == pytest.approx(predicted, rel=1e-5)


def test_words_or_letters_get_a_label_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = encoder(tmp_path, head="token", labels="C,E,H")
    letters, blank, _, words = answers(tmp_path, folder, [{"text": text} for text in TEXTS])
    assert (len(letters["labels"]), blank["labels"], len(words["labels"])) == (4, None, 3)
    assert set(letters["labels"]) <= set("CEH") and len(letters["probabilities"]) == 4
    assert all(1 / 3 <= share <= 1 for share in letters["probabilities"])
    capsys.readouterr()
    generate(flags_of("generate", model=folder, input="MKVL", mixed_precision="no"))
    assert capsys.readouterr().out.strip() == "".join(letters["labels"])


def test_a_list_of_words_gets_one_label_for_each_word(tmp_path: Path) -> None:
    """As files of named entities have them; a single word as well, whose letters have tokens of their own."""
    folder = encoder(tmp_path, head="token", labels="O,PER")
    (folder / "settings.json").write_text(json.dumps({"text_column": "tokens", "label_column": "tags"}))
    rows = [["EU", "rejects", "it", "."], ["German"], ["a", "b"]]
    source = write_rows(tmp_path / "words.jsonl", ({"tokens": words} for words in rows))
    arguments = {"model": folder, "input": source, "output": tmp_path / "out.jsonl", "mixed_precision": "no"}
    generate(flags_of("generate", **arguments))
    written = read_rows(tmp_path / "out.jsonl")
    assert [row["tokens"] for row in written] == rows
    assert [len(row["labels"]) for row in written] == [4, 1, 2]
    assert all({*row["labels"]} <= {"O", "PER"} for row in written)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("generate", {"input": "x", "prompt_column": "question"}),
        ("serve", {"temperature": 0.5}),
        ("evaluate", {"validation_file": "rows.jsonl", "history_column": "earlier"}),
    ],
)
def test_settings_of_text_are_refused(tmp_path: Path, command: str, flags: dict[str, Any]) -> None:
    folder = encoder(tmp_path, head="sequence", labels="few,many")
    name, value = list(flags.items())[-1]
    with pytest.raises(UserError, match=f"^--{name} = {value}"):
        find_answering(flags_of(command, model=folder, **flags), command)
