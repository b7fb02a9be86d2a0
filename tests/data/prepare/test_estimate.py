"""The first rows stand for all of them, with a margin; a tokenizer of another language is found out."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.estimate import TIMES_LONGER, LengthEstimate, estimate_lengths, misfit
from data.prepare.preparing import prepare
from data.shards.store import Manifest
from data.tokenizers.training import train_tokenizer
from settings.declared import Config
from tests.data.sources.rows import write_rows

Configure = Callable[..., Config]


def estimate_of(config: Config) -> LengthEstimate | None:
    return estimate_lengths(config.data, config.train.is_finetune, config.model, config.tokenizer, config.cleaning)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"prompt": "p" * (1 + number % 90), "response": "r" * (1 + number % 7)} for number in range(900)]
    return write_rows(tmp_path / "rows.jsonl", rows)


def test_the_estimate_is_like_all_rows(configure: Configure, file: Path, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "valid.jsonl", [{"prompt": "question", "response": "yes"}] * 7)
    config = configure(train_file=file, validation_file=held_out, max_seq_len=64, max_target_len=64)
    estimate = estimate_of(config)
    assert estimate is not None and estimate.is_all and estimate.longest(config.data) == (64, 8)
    assert estimate.held_out_rows == 7
    sources, targets = estimate.cut(config.data)
    assert (len(sources), int(sources.max()), int(targets.max())) == (900, 64, 8)
    facts = Manifest.of(prepare(config).train_dir).lengths("train")
    assert sources.mean() == pytest.approx(facts["input_ids"]["mean"], rel=0.02)
    assert targets.mean() == pytest.approx(facts["labels"]["mean"], rel=0.02)


def test_a_text_with_a_label_is_as_long_as_the_settings_allow(configure: Configure, tmp_path: Path) -> None:
    rows = [{"text": "a" * 90, "label": str(number % 2)} for number in range(90)]
    file = write_rows(tmp_path / "labels.jsonl", rows)
    config = configure(train_file=file, head="sequence", tokenizer_type="byte", max_seq_len=64)
    estimate = estimate_of(config)
    assert estimate is not None and estimate.longest(config.data)[0] == 64
    assert estimate.cut(config.data)[0].max() == 64


def test_each_text_of_a_row_is_cut(configure: Configure, tmp_path: Path) -> None:
    rows = [{"query": "a" * 40, "pos": ["b" * (number % 9 + 1)], "neg": []} for number in range(90)]
    file = write_rows(tmp_path / "pairs.jsonl", [*rows, {"query": "a", "pos": ["b"], "neg": list("cdefgh")}])
    config = configure(train_file=file, head="embedding", tokenizer_type="byte", max_seq_len=16)
    estimate = estimate_of(config)
    assert estimate is not None and estimate.longest(config.data) == (16 + 10 + 6 * 2, 0)
    sources, _ = estimate.cut(config.data)
    assert (sources.max(), sources[-1]) == (16 + 10, 8 * 2)
    assert 2 < estimate.texts < 2.1


def test_a_tokenizer_that_is_not_trained_yet_has_a_stand_in(configure: Configure, tmp_path: Path) -> None:
    words = ["quick", "brown", "foxes", "jump", "over", "lazy", "dogs", "while", "seven", "wizards", "watch"]
    draw = np.random.default_rng(1)
    rows = [{"prompt": " ".join(draw.choice(words, 12)), "response": str(draw.choice(words))} for _ in range(600)]
    path = write_rows(tmp_path / "words.jsonl", rows)
    config = configure(train_file=path, tokenizer_dir="auto", tokenizer_type="bpe", vocab_size=512, max_seq_len=256)
    estimate = estimate_of(config)
    assert estimate is not None and not estimate.is_all and estimate.num_rows == 300
    facts = Manifest.of(prepare(config).train_dir).lengths("train")["input_ids"]
    assert facts["mean"] <= estimate.sources.mean() < 1.5 * facts["mean"]
    longest = TIMES_LONGER * int(estimate.sources.max())
    assert estimate.longest(config.data)[0] == longest >= facts["longest"], "others may be longer"


def test_a_tokenizer_of_another_language_spells_the_data_out(
    configure: Configure, tmp_path: Path, byte_dir: Path
) -> None:
    poem = "长江是亚洲第一长河，发源于青藏高原，流经十一个省，注入东海。黄河是中国的母亲河。今天天气怎么样？我想去北京看故宫。"
    prose = inspect.getsource(argparse)[:60_000].split("\n\n")
    folder = tmp_path / "en"
    train_tokenizer(prose, "bpe", 2000, 2**20).save(folder)
    pairs = [{"prompt": poem[number % 40 :], "response": poem[: number % 50 + 5]} for number in range(120)]
    chinese = write_rows(tmp_path / "zh.jsonl", pairs)
    english = write_rows(tmp_path / "en.jsonl", [{"prompt": part, "response": "r"} for part in prose])
    assert "times" in misfit(configure(train_file=chinese, tokenizer_dir="auto").data, False, folder)
    assert misfit(configure(train_file=english, tokenizer_dir="auto").data, False, folder) == ""
    assert "--tokenizer_dir" in misfit(configure(train_file=chinese).data, False, folder), "that of bytes is named"
    assert misfit(configure(train_file=chinese).data, False, byte_dir) == ""


def test_rows_of_parquet_files_are_counted_by_all_footers(configure: Configure, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(20):
        rows = [{"prompt": "p" * (1 if number % 2 else 900), "response": f"r{row}"} for row in range(1 + 9 * number)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{number:02d}.parquet")
    estimate = estimate_of(configure(train_file=folder))
    assert estimate is not None and estimate.about_rows == sum(1 + 9 * number for number in range(20))
