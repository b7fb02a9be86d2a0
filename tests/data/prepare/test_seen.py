"""Rows are shown as the model sees them: worded, cut, with their tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from config import Config
from data.batches.loader import StepLoader
from data.prepare.preparing import prepare
from data.prepare.seen import columns_of_shards, lost_of_shards, passed_over, rows_of_files, rows_of_shards, shown, told
from data.shards.store import PAIRS
from data.tokenizers.tokenizer import Tokenizer

Configure = Callable[..., Config]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"question": "q" * (3 + 40 * (at % 2)), "answer": f"a{at}"} for at in range(150)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf8")
    return tmp_path / "rows.json"


def test_shards_and_files_show_the_same(configure: Configure, file: Path) -> None:
    config = configure(train_file=file, max_seq_len=32, max_target_len=16, prompt_template="question")
    task, rows, cut, _ = rows_of_files(config, 2)
    assert [list(row.texts) for row in rows] == [["question: qqq", "a0"], ["question: " + "q" * 21, "a1"]]
    assert [list(row.tokens) for row in rows] == [[14, 3], [32, 3]]
    assert cut.startswith("75 of the first 150 rows (50.0%) are longer than --max_seq_len=32 or --max_target_len=16")
    prepared = prepare(config)
    loader = StepLoader(prepared.train_dir, prepared.objective, config)
    stored = rows_of_shards(loader, Tokenizer.load(prepared.tokenizer_dir), 2)
    assert stored[0].texts == list(rows[0].texts) and len(stored) == 2
    ((name, cut_whole),) = lost_of_shards(config, prepared)
    assert columns_of_shards(prepared) == task.columns.sides() and name == "cut" and " rows (49.7%)" in cut_whole
    table = told(stored, task.columns.sides())
    assert table[0] == ("columns", "question -> answer (--prompt_column, --response_column)")
    assert table[1] == ("encoder", "question: qqq (14 tokens)") and table[2] == ("decoder", "a0 (3 tokens)")


@pytest.mark.parametrize("is_known", [True, False])
def test_as_many_rows_are_shown_as_are_asked_for(configure: Configure, tmp_path: Path, is_known: bool) -> None:
    """Of conversations two answers, not all those of two; what is left out is not counted."""
    talks = [[], *([[f"q{talk}.{turn}", f"a{talk}.{turn}"] for turn in range(3)] for talk in range(4))]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in talks), encoding="utf8")
    config = configure(train_file=path, expand_turns=True)
    worded = {} if is_known else {"worded": tmp_path}
    _, rows, *_ = rows_of_files(config, 2, **worded)
    assert [list(row.texts) for row in rows] == [["q0.0", "a0.0"], ["q0.0\na0.0\nq0.1", "a0.1"]]


def test_masks_are_shown(configure: Configure, text_file: Path) -> None:
    config = configure(train_file=text_file)
    prepared = prepare(config)
    loader = StepLoader(prepared.train_dir, prepared.objective, config)
    (row,) = rows_of_shards(loader, Tokenizer.load(prepared.tokenizer_dir), 1)
    assert "<extra_id_0>" in row.texts[0] and row.texts[1].startswith("<extra_id_0>")
    assert lost_of_shards(config, prepared) == [], "of many rows hardly anything is left at the end"


def test_the_end_of_a_text_that_fills_no_row_is_told(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("\n\n".join(["word " * 30] * 10), encoding="utf8")
    config = configure(train_file=tmp_path / "short.txt", tokenizer_type="byte", max_seq_len=256)
    prepared = prepare(config)
    tokens, window = prepared.counts["train_tokens"], StepLoader(prepared.train_dir, "span", config).lengths.raw_tokens
    ((name, left),) = lost_of_shards(config, prepared)
    assert name == "never read" and 0 < tokens % window < window < tokens
    assert left.startswith(f"the last {tokens % window} of {tokens:,} tokens, as a row takes {window};")


def test_rows_that_are_left_out_are_told(configure: Configure, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"p{at}", "response": "r" if at % 50 else ""}) for at in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf8")
    config = configure(train_file=tmp_path / "rows.jsonl", skip_bad_rows=True)
    (name, count) = lost_of_shards(config, prepare(config))[-1]
    assert name == "left out: broken" and count.startswith("4, such as ")


def test_files_of_a_folder_that_are_not_read_are_told(configure: Configure, file: Path) -> None:
    assert passed_over(configure(train_file=file.parent), PAIRS) == []
    (file.parent / "more.jsonl").write_text('{"prompt": "p", "response": "r"}\n', encoding="utf8")
    ((name, told_files),) = passed_over(configure(train_file=file, validation_file=file.parent), PAIRS)
    assert name == "not read" and told_files.startswith("1 .json") and f"the first {file};" in told_files
    prepared = prepare(configure(train_file=file))
    assert passed_over(configure(train_file=prepared.train_dir, validation_file=file.parent / "none"), PAIRS) == []


def test_long_texts_keep_both_ends() -> None:
    assert shown("a\nb") == "a\\nb"
    assert len(shown("x" * 1000 + "end")) < 260 and shown("x" * 1000 + "end").endswith("end")
