"""Rows are shown as the model receives them: worded, cut, with their tokens; and what of the data is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.terminal import one_line
from data.prepare.encode import TextEncoder
from data.prepare.preparing import prepare
from data.prepare.preview import lost_of_shards, shown, table_of_files, table_of_shards
from data.prepare.training_data import find_training_data
from data.prepare.unread import passed_over
from data.task import Table
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from settings.declared import Config
from settings.tasks import task_named
from tests.data.loaders import loader_of

Configure = Callable[..., Config]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"question": "q" * (3 + 40 * (number % 2)), "answer": f"a{number}"} for number in range(150)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf8")
    return tmp_path / "rows.json"


def of_shards(config: Config, count: int) -> Table:
    prepared = prepare(config)
    loader = loader_of(prepared.train_dir, prepared.objective, config)
    return table_of_shards(config.data, prepared, loader, Tokenizer.load(prepared.tokenizer_dir), count)


def of_files(config: Config, count: int, is_known: bool = True) -> Table:
    training_data = find_training_data(config.data, config.train.is_finetune)
    tokenizer_dir = Path(config.data.tokenizer_dir) if is_known else None
    return table_of_files(config.data, training_data, config.cleaning, count, tokenizer_dir)


def test_shards_and_files_show_the_same(configure: Configure, file: Path) -> None:
    config = configure(train_file=file, max_seq_len=32, max_target_len=16, prompt_template="question")
    rows = [
        ("columns", "question -> answer (--prompt_column, --response_column)"),
        ("encoder", "question: qqq (14 tokens)"),
        ("decoder", "a0 (3 tokens)"),
        ("encoder", f"question: {'q' * 21} (32 tokens)"),
        ("decoder", "a1 (3 tokens)"),
    ]
    table = of_files(config, 2)
    assert table[:5] == rows and table[5][0] == "cut" and table[5][1].startswith("75 of the first 150 rows (50.0%)")
    from_shards = of_shards(config, 1)
    assert from_shards[:3] == rows[:3] and from_shards[3][0] == "cut" and " rows (49.7%)" in from_shards[3][1]


@pytest.mark.parametrize("is_known", [True, False])
def test_as_many_rows_are_shown_as_are_asked_for(configure: Configure, tmp_path: Path, is_known: bool) -> None:
    """Of conversations two answers, not all those of two; what is left out is not counted."""
    talks = [[], *([[f"q{talk}.{turn}", f"a{talk}.{turn}"] for turn in range(3)] for talk in range(4))]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in talks), encoding="utf8")
    table = of_files(configure(train_file=path, expand_turns=True), 2, is_known)
    texts = [cell.partition(" (")[0] for side, cell in table if side in ("encoder", "decoder")]
    assert texts == ["q0.0", "a0.0", "q0.0\\na0.0\\nq0.1", "a0.1"]


def test_masks_are_shown(configure: Configure, text_file: Path) -> None:
    encoder, decoder, *lost = of_shards(configure(train_file=text_file), 1)
    assert "<extra_id_0>" in encoder[1] and decoder[1].startswith("<extra_id_0>")
    assert lost == [], "of many rows hardly anything is left at the end"


def test_what_is_lost_is_shown(configure: Configure, tmp_path: Path) -> None:
    """The end of a text that fills no row, rows that are left out, and letters that the tokenizer lacks."""
    (tmp_path / "short.txt").write_text("\n\n".join(["word " * 30] * 10), encoding="utf8")
    config = configure(train_file=tmp_path / "short.txt", max_seq_len=256)
    prepared = prepare(config)
    tokens = prepared.counts["train_tokens"]
    window = loader_of(prepared.train_dir, "span", config).lengths.raw_tokens
    ((name, cell),) = lost_of_shards(config.data, prepared)
    assert name == "never read" and cell.startswith(f"the last {tokens % window} of {tokens:,} tokens")

    lines = [json.dumps({"prompt": f"p{number}", "response": "r" if number % 50 else ""}) for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf8")
    config = configure(train_file=tmp_path / "rows.jsonl", skip_bad_rows=True)
    (name, cell) = lost_of_shards(config.data, prepare(config))[-1]
    assert name == "left out: broken" and cell.startswith("4, such as ")

    train_tokenizer(["M K V L A C D W Y G S"], "words", 200, 2**20).save(tmp_path / "words")
    proteins = tmp_path / "proteins.jsonl"
    rows = [{"text": text} for text in ["MKVLAC", "ACDW", "WWYLKKKKM", "GGAS"] * 30]
    proteins.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    flags = {"train_file": proteins, "tokenizer_dir": tmp_path / "words", "objective": "denoise"}
    raw = configure(**flags)
    assert "--prepare_text" in dict(lost_of_shards(raw.data, prepare(raw)))["unknown"]
    spaced = prepare(configure(**flags, prepare_text="prott5"))
    assert spaced.counts["train_unknown_tokens"] == 0, "pretraining prepares texts too"


@pytest.mark.parametrize("prepare_text", ["prott5", "prostt5", "ankh"])
def test_prepared_proteins_have_a_token_for_each_letter(prepare_text: str) -> None:
    pieces = ["A B C D E F G H I K L M N P Q R S T V W X Y Z <AA2fold>"] * 2
    tokenizer = train_tokenizer(pieces, "words", 200, 2**20)
    encoder = TextEncoder(tokenizer, prepare_text)
    ids, first_tokens = encoder.with_places("MKUAC")
    assert encoder.encode(["MKUAC"])[0].tolist() == ids.tolist()
    letters = "".join(str(tokenizer.id_to_token(int(number))) for number in ids[first_tokens])
    assert letters == ("MK<unk>AC" if prepare_text == "ankh" else "MKXAC")


def test_files_of_a_folder_that_are_not_read_are_named(configure: Configure, file: Path) -> None:
    assert passed_over(configure(train_file=file.parent).data, task_named("pairs")) == []
    (file.parent / "more.jsonl").write_text('{"prompt": "p", "response": "r"}\n', encoding="utf8")
    ((name, cell),) = passed_over(configure(train_file=file, validation_file=file.parent).data, task_named("pairs"))
    assert name == "not read" and cell.startswith("1 .json") and str(file) in cell
    shards = configure(train_file=prepare(configure(train_file=file)).train_dir, validation_file=file.parent / "none")
    assert passed_over(shards.data, task_named("pairs")) == []


def test_long_texts_keep_both_ends() -> None:
    assert shown("a\nb") == "a\\nb"
    assert len(shown("x" * 1000 + "end")) < 260 and shown("x" * 1000 + "end").endswith("end")
    family = "\U0001f468\u200d\U0001f469"
    cut = shown(f"�好{'e' + chr(0x301)}" + "x" * 200 + f"é{family}�")
    assert "�" not in cut and cut.endswith(f"é{family}") and cut.startswith(f"好e{chr(0x301)}")
    line = one_line("y" * 9 + "e" + chr(0x301) * 2 + "z" * 9, 13)
    assert line == "y" * 9 + "e" + chr(0x301) * 2 + "...", "no halves of letters"
