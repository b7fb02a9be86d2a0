"""A tokenizer of another language is found out; one of the same is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from config import Config
from data.prepare.fitting import Fit, measure_fit
from data.sources.corpus import SampleCorpus
from data.tokenizers.training import train_tokenizer

CHINESE = (
    "长江是亚洲第一长河，发源于青藏高原，流经十一个省，注入东海。黄河是中国的母亲河。今天天气怎么样？我想去北京看故宫。"
)


@pytest.fixture
def chinese(tmp_path: Path) -> Path:
    path = tmp_path / "zh.jsonl"
    rows = [{"prompt": CHINESE[at % 40 :], "response": CHINESE[: at % 50 + 5]} for at in range(120)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    return path


def english(sample: SampleCorpus, folder: Path, kind: str) -> Path:
    texts = [json.loads(line)["text"] for line in sample.text.read_text("utf8").splitlines()[:60]]
    train_tokenizer(texts, kind, 2000, 2**20).save(folder)
    return folder


def test_an_english_tokenizer_spells_chinese_out(
    sample: SampleCorpus, chinese: Path, tmp_path: Path, configure: Callable[..., Config]
) -> None:
    folder = english(sample, tmp_path / "en", "bpe")
    config = configure(train_file=chinese, tokenizer_dir="auto", objective="pairs")
    found = measure_fit(config, folder)
    assert found.times > 3.0 and not found.is_other and "times the tokens" in found.problem()
    own = measure_fit(configure(train_file=sample.pairs, tokenizer_dir="auto"), folder)
    assert own.times < 2.0 and own.problem() == ""


def test_a_tokenizer_of_the_data_or_the_settings_decides(
    sample: SampleCorpus, chinese: Path, tmp_path: Path, configure: Callable[..., Config], byte_dir: Path
) -> None:
    folder = english(sample, tmp_path / "en", "bpe")
    config = configure(train_file=chinese, objective="pairs")  # with the tokenizer of bytes
    assert measure_fit(config, folder).is_other and "is another" in measure_fit(config, folder).problem()
    assert not measure_fit(config, byte_dir).is_other


def test_unknown_letters_are_lost() -> None:
    assert "cannot spell 5.0%" in Fit(lost=0.05).problem() and Fit(lost=0.0005).problem() == ""
