"""`generate` with a head over labels: a class, a number, or a label for each word or letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands.answering import find_answering
from commands.evaluate import evaluate
from commands.generate import generate
from settings.errors import UserError
from settings.loading import load
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


@pytest.mark.parametrize("decoder", [0, 2])
def test_a_text_gets_its_label_and_the_probability_of_each(tmp_path: Path, decoder: int) -> None:
    folder = encoder(tmp_path, head="sequence", labels="few,many", num_decoder_layers=decoder)
    rows = answers(tmp_path, folder, [{"text": text, "label": "right", "id": 3} for text in TEXTS])
    assert [row["text"] for row in rows] == TEXTS
    assert all((row["reference"], row["id"]) == ("right", 3) for row in rows)
    assert rows[1]["label"] is None and "probabilities" not in rows[1]
    for row in (rows[0], *rows[2:]):
        shares = row["probabilities"]
        assert list(shares) == ["few", "many"] and sum(shares.values()) == pytest.approx(1, abs=1e-5)
        assert row["label"] == max(shares, key=shares.__getitem__)


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


def test_rows_at_once_change_no_answer(tmp_path: Path) -> None:
    folder = encoder(tmp_path, head="sequence", labels="regression")
    rows = [{"text": text} for text in TEXTS if text]
    together = answers(tmp_path, folder, rows)
    alone = answers(tmp_path, folder, rows, generate_batch_size=1)
    assert [row["number"] for row in together] == pytest.approx([row["number"] for row in alone], rel=1e-5)


def test_what_is_cut_has_no_label_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = encoder(tmp_path, head="token", labels="C,E,H")
    (row,) = answers(tmp_path, folder, [{"text": "MKVLACDEFGHIKL"}], max_seq_len=8)
    assert row["labels"][-1] is None and row["labels"][0] in "CEH"
    assert "--max_seq_len=8" in capsys.readouterr().out


def test_the_settings_of_a_run_are_a_file_for_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = encoder(tmp_path, head="sequence", labels="few,many")
    load("train", {"head": "sequence"}).save(tmp_path / "settings.json")
    generate(load("generate", {"config": str(tmp_path / "settings.json"), "model": str(folder), "input": "x"}))
    assert capsys.readouterr().out.startswith(("few", "many"))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_list_of_words_gets_one_label_for_each_word(tmp_path: Path, ending: str) -> None:
    """As files of named entities have them; a single word as well, whose letters have tokens of their own."""
    folder = encoder(tmp_path, head="token", labels="O,PER")
    (folder / "settings.json").write_text(json.dumps({"text_column": "tokens", "label_column": "tags"}))
    rows = [["EU", "rejects", "it", "."], ["German"], ["a", "b"]]
    source = tmp_path / f"words.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"tokens": rows}), source)
    else:
        write_rows(source, ({"tokens": words} for words in rows))
    arguments = {"model": folder, "input": source, "output": tmp_path / "out.jsonl", "mixed_precision": "no"}
    generate(flags_of("generate", **arguments))
    written = read_rows(tmp_path / "out.jsonl")
    assert [row["tokens"] for row in written] == rows
    assert [len(row["labels"]) for row in written] == [4, 1, 2]
    assert all({*row["labels"]} <= {"O", "PER"} for row in written)


def test_a_list_with_an_entry_that_is_no_word_is_a_bad_row(tmp_path: Path) -> None:
    folder = encoder(tmp_path, head="token", labels="O,PER")
    rows = [{"text": ["two words", "x"]}, {"text": ["fine"]}, {"text": [1]}]
    assert [row["labels"] is None for row in answers(tmp_path, folder, rows)] == [True, False, True]
    with pytest.raises(UserError, match="--skip_bad_rows"):
        answers(tmp_path, folder, rows, skip_bad_rows=False)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("generate", {"input": "x", "prompt_column": "question"}),
        ("generate", {"input": "x", "source_prefix": "label: "}),
        ("generate", {"input": "x", "num_beams": 4}),
        ("serve", {"prompt_template": "chat"}),
        ("serve", {"temperature": 0.5}),
        ("serve", {"system_prompt": "be brief"}),
        ("evaluate", {"validation_file": "rows.jsonl", "prompt_column": "question"}),
        ("evaluate", {"validation_file": "rows.jsonl", "messages_column": "turns"}),
        ("evaluate", {"validation_file": "rows.jsonl", "history_column": "earlier"}),
    ],
)
def test_settings_of_text_are_refused(tmp_path: Path, command: str, flags: dict[str, Any]) -> None:
    folder = encoder(tmp_path, head="sequence", labels="few,many")
    name, value = list(flags.items())[-1]
    with pytest.raises(UserError, match=f"^--{name} = {value}"):
        find_answering(flags_of(command, model=folder, **flags), command)


@pytest.mark.parametrize(
    "flags", [{"prompt_template": "chat"}, {"source_prefix": "a: "}, {"system_prompt": "b"}, {"temperature": 0.5}]
)
def test_an_encoder_is_served_without_settings_of_prompts(tmp_path: Path, flags: dict[str, Any]) -> None:
    folder = encoder(tmp_path, head="none")
    (name,) = flags
    with pytest.raises(UserError, match=f"^--{name} = .*, is for models that write text"):
        find_answering(flags_of("serve", model=folder, **flags), "serve")
