"""Rows are shown as the model receives them: worded, cut, with their tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.prepare.preparing import prepare
from data.prepare.preview import table_of_files, table_of_shards
from data.prepare.training_data import find_training_data
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import Config
from tests.data.loaders import loader_of
from tests.data.sources.rows import write_rows


def test_shards_and_files_show_the_same(configure: Callable[..., Config], tmp_path: Path) -> None:
    pairs = [{"question": "q" * (3 + 40 * (number % 2)), "answer": f"a{number}"} for number in range(150)]
    file = write_rows(tmp_path / "rows.json", pairs)
    config = configure(train_file=file, max_seq_len=32, max_target_len=16, prompt_template="question")
    rows = [
        ("columns", "question -> answer (--prompt_column, --response_column)"),
        ("encoder", "question: qqq (14 tokens)"),
        ("decoder", "a0 (3 tokens)"),
        ("encoder", f"question: {'q' * 21} (32 tokens)"),
        ("decoder", "a1 (3 tokens)"),
    ]
    training_data = find_training_data(config.data, config.train.is_finetune)
    table = table_of_files(config.data, training_data, config.cleaning, 2, Path(config.data.tokenizer_dir))
    assert table[:5] == rows and table[5][0] == "cut" and table[5][1].startswith("75 of the first 150 rows (50.0%)")
    prepared = prepare(config)
    loader = loader_of(prepared.train_dir, prepared.objective, config)
    table = table_of_shards(config.data, prepared, loader, Tokenizer.load(prepared.tokenizer_dir), 1)
    assert table[:3] == rows[:3] and table[3][0] == "cut" and " rows (49.7%)" in table[3][1]
