"""Rows are shown as the model receives them: worded, cut, with their tokens; and what of the data is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data.prepare.preparing import prepare
from data.prepare.preview import table_of_files, table_of_shards
from data.prepare.training_data import find_training_data
from data.task import Table
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import Config
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


def of_files(config: Config, count: int) -> Table:
    training_data = find_training_data(config.data, config.train.is_finetune)
    return table_of_files(config.data, training_data, config.cleaning, count, Path(config.data.tokenizer_dir))


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


def test_masks_are_shown(configure: Configure, text_file: Path) -> None:
    encoder, decoder, *lost = of_shards(configure(train_file=text_file), 1)
    assert "<extra_id_0>" in encoder[1] and decoder[1].startswith("<extra_id_0>")
    assert lost == [], "of many rows hardly anything is left at the end"
