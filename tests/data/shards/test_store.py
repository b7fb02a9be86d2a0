"""Shards: rows come back, a writer continues, and what is damaged is named before a row is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from data.dataset import LowMemDataset
from data.prepare.preparing import Prepared, prepare
from data.shards import writer
from data.shards.store import MANIFEST, Manifest, check_shards
from data.shards.writer import Column, ShardWriter
from data.task import ShardFormat
from settings.errors import UserError
from tests.data.conftest import Configure
from tests.data.loaders import loader_of

ROW_TOKENS = 512
PAIRS = ShardFormat("pairs", ("input_ids", "labels"))
STREAM = ShardFormat("stream", ("tokens",), row_tokens=ROW_TOKENS)


def pairs(first: int, count: int, label: int) -> list[Column]:
    """Columns of so many pairs: inputs of 0 to 10 ids, and three labels."""
    lengths = np.arange(first, first + count) % 11
    inputs = np.concatenate([np.arange(length) for length in lengths])
    return [(inputs, lengths), (np.full(3 * count, label), np.full(count, 3))]


@pytest.mark.parametrize(("vocab_size", "dtype", "step"), [(2**16, np.uint16, 7), (2**16 + 1, np.int32, 700)])
def test_rows_come_back_from_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int, dtype: type, step: int
) -> None:
    monkeypatch.setattr(writer, "SHARD_ROWS", 300)
    with ShardWriter(tmp_path, PAIRS, vocab_size) as split:
        for first in range(0, 700, step):
            split.add(pairs(first, step, vocab_size - 1))
        split.finish()
    assert [shard["rows"] for shard in split.shards] == [300, 300, 100]
    for number, row in enumerate(LowMemDataset(tmp_path)):
        assert row["input_ids"].tolist() == list(range(number % 11))
        assert row["labels"].tolist() == [vocab_size - 1] * 3
        assert row["labels"].dtype == dtype


def test_a_writer_continues_from_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as it has to, whatever was written behind it."""
    monkeypatch.setattr(writer, "SHARD_ROWS", 500)
    lengths = np.full(300, 3)
    columns = [(np.arange(900, dtype=np.int32), lengths)]
    lost_columns = [(np.arange(1, 901, dtype=np.int32), lengths)]
    with ShardWriter(tmp_path / "unbroken", STREAM, 1000) as unbroken:
        for _ in range(150):
            unbroken.add(columns)
        unbroken.finish()
    state = None
    for times in (75, 75):
        with ShardWriter(tmp_path / "broken", STREAM, 1000, state) as broken:
            for _ in range(times):
                broken.add(columns)
            state = json.loads(json.dumps(broken.state()))
            broken.add(lost_columns)
    with ShardWriter(tmp_path / "broken", STREAM, 1000, state) as last:
        last.finish()
    assert last.shards == unbroken.shards


@pytest.fixture
def prepared(configure: Configure, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setattr(writer, "SHARD_ROWS", 16)
    return prepare(configure(train_file=text_file))


@pytest.mark.parametrize(
    ("text", "changed", "words"),
    [
        ('"format": ', '"format": 9', "of another format"),
        ('"sentinel_ids": [', '"sentinel_ids": ["x", ', "sentinel_ids is not what"),
        ('"file": "', '"file": "../../etc/', "file is not what"),
        ("{", "", "cannot be read"),
    ],
)
def test_a_manifest_that_someone_has_changed_says_what_is_wrong(
    prepared: Prepared, text: str, changed: str, words: str
) -> None:
    path = prepared.train_dir.parent / MANIFEST
    content = path.read_text()
    assert text in content
    path.write_text(content.replace(text, changed, 1))
    with pytest.raises(UserError, match=words):
        Manifest.read(path.parent)


def test_a_flipped_bit_in_a_shard_is_told_before_the_first_row(prepared: Prepared) -> None:
    check_shards(prepared.train_dir, prepared.validation_dir)
    shards = sorted(prepared.train_dir.glob("*.arrow"))
    assert len(shards) > 2
    for shard in shards[:2]:
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    with pytest.raises(UserError) as caught:
        check_shards(prepared.train_dir)
    assert len(caught.value.problems) == 2
    for shard, problem in zip(shards, caught.value.problems, strict=False):
        assert str(shard) in problem and "is damaged, its checksum" in problem


def test_an_id_behind_the_vocabulary_is_told_with_its_row(configure: Configure, pairs_file: Path) -> None:
    config = configure(train_file=pairs_file)
    prepared = prepare(config)
    path = prepared.train_dir.parent / MANIFEST
    content = json.loads(path.read_text())
    content["tokenizer"]["size"] = 100  # The ids of the bytes above 96 look like damage then.
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"train, row \d+: \w+ holds the id \d+, the tokenizer has ids 0 to 99"):
        loader_of(prepared.train_dir, prepared.objective, config).micro_batches(0, effective_batch_size=8, batch_size=8)
