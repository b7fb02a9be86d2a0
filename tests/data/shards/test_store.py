"""Shards: rows come back, a writer continues, and what is damaged is named before a row is read."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.dataset import LowMemDataset
from data.prepare.preparing import Prepared, prepare
from data.shards import writer
from data.shards.store import BATCH_ROWS, FORMAT, MANIFEST, Manifest, check_shards, is_shards
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
    for shard in split.shards:
        assert shard["crc32"] == zlib.crc32((tmp_path / shard["file"]).read_bytes())
    with pa.memory_map(str(tmp_path / "00000.arrow")) as file:
        reader = pa.ipc.open_file(file)
        assert [reader.get_batch(n).num_rows for n in range(3)] == [BATCH_ROWS, BATCH_ROWS, 300 - 2 * BATCH_ROWS]
    for number, row in enumerate(LowMemDataset(tmp_path)):
        assert row["input_ids"].tolist() == list(range(number % 11))
        assert row["labels"].tolist() == [vocab_size - 1] * 3
        assert row["labels"].dtype == dtype


@pytest.mark.parametrize("pieces", [1, 97])
def test_a_stream_is_cut_into_rows_whatever_comes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(writer, "SHARD_ROWS", 2)
    tokens = np.arange(ROW_TOKENS * 5 + 17, dtype=np.int32) % 300
    with ShardWriter(tmp_path, STREAM, 384) as split:
        for piece in np.array_split(tokens, pieces):
            split.add([(piece, np.array([len(piece)]))])
        split.finish()
    assert [shard["rows"] for shard in split.shards] == [2, 2, 2]
    rows = [row["tokens"] for row in LowMemDataset(tmp_path)]
    assert [len(row) for row in rows] == [ROW_TOKENS] * 5 + [17]
    assert np.concatenate(rows).tolist() == tokens.tolist()


@pytest.mark.parametrize(("format", "attempts"), [(PAIRS, [1, 1, 1]), (STREAM, [75, 75])])
def test_a_writer_continues_from_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: ShardFormat, attempts: list[int]
) -> None:
    """As often as it has to, whatever was written behind it."""
    monkeypatch.setattr(writer, "SHARD_ROWS", 500)
    lengths = np.full(300, 3)
    columns = [(np.arange(900, dtype=np.int32), lengths)] * len(format.columns)
    lost_columns = [(np.arange(1, 901, dtype=np.int32), lengths)] * len(format.columns)
    with ShardWriter(tmp_path / "unbroken", format, 1000) as unbroken:
        for _ in range(sum(attempts)):
            unbroken.add(columns)
        unbroken.finish()
    state = None
    for times in attempts:
        with ShardWriter(tmp_path / "broken", format, 1000, state) as broken:
            for _ in range(times):
                broken.add(columns)
            state = json.loads(json.dumps(broken.state()))
            broken.add(lost_columns)
    with ShardWriter(tmp_path / "broken", format, 1000, state) as last:
        last.finish()
    assert last.shards == unbroken.shards


SPLIT = {
    "counts": {"rows": 1},
    "lengths": {"tokens": {"longest": 3, "longest_uncut": 3, "mean": 3.0, "histogram": [[3, 1]]}},
    "parts": [{"name": "", "rows": 1, "tokens": 3}],
    "shards": [{"file": "a", "rows": 1, "crc32": 0}],
}
TOKENIZER = {"fingerprint": "0", "size": 9, "pad_id": 0, "eos_id": 1, "unk_id": 2, "sentinel_ids": [8]}


def manifest(folder: Path, **changes: object) -> Path:
    content = {
        "format": FORMAT,
        "kind": STREAM.kind,
        "fingerprint": "0",
        "dropped": {},
        "tokenizer": TOKENIZER,
        "splits": {"train": SPLIT},
        "labels": [],
        "label_counts": {},
    }
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).write_text(json.dumps({**content, **changes}))
    return folder


def test_a_folder_and_its_splits_are_known_as_shards(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "shards")
    (folder / "train").mkdir()
    assert is_shards(folder) and is_shards(folder / "train") and not is_shards(tmp_path)
    assert Manifest.of(folder / "train").root == folder == Manifest.of(folder).root


def test_broken_folders_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a shards folder"):
        Manifest.read(tmp_path)
    with pytest.raises(UserError, match="of another format"):
        Manifest.read(manifest(tmp_path, format=0))
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        Manifest.read(tmp_path)
    sound = Manifest.read(manifest(tmp_path))
    with pytest.raises(UserError, match=r"a: is missing"):
        sound.files("train")
    with pytest.raises(UserError, match="holds no validation rows, only train; give others with --validation_file"):
        sound.files("validation")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": {**TOKENIZER, "sentinel_ids": [8, "x"]}}, "sentinel_ids is not what"),
        ({"splits": {}}, "splits is not what"),
        (
            {"splits": {"train": {**SPLIT, "shards": [{"file": "../../etc/passwd", "rows": 1, "crc32": 0}]}}},
            "file is not what",
        ),
    ],
)
def test_a_manifest_that_lacks_something_says_what(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=rf"manifest\.json: {words}"):
        Manifest.read(manifest(tmp_path, **changes))


@pytest.fixture
def prepared(configure: Configure, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setattr(writer, "SHARD_ROWS", 16)
    return prepare(configure(train_file=text_file))


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


@pytest.mark.parametrize("objective, column", [("span", "tokens"), ("pairs", "labels")])
def test_an_id_behind_the_vocabulary_is_told_with_its_row(
    configure: Configure, text_file: Path, pairs_file: Path, objective: str, column: str
) -> None:
    config = configure(train_file=pairs_file if objective == "pairs" else text_file, objective=objective)
    prepared = prepare(config)
    path = prepared.train_dir.parent / MANIFEST
    content = json.loads(path.read_text())
    content["tokenizer"]["size"] = 100  # The ids of the bytes above 96 look like damage then.
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"train, row \d+: \w+ holds the id \d+, the tokenizer has ids 0 to 99"):
        loader_of(prepared.train_dir, prepared.objective, config).micro_batches(0, effective_batch_size=8, batch_size=8)


def test_a_split_without_rows_or_with_other_columns_is_told(configure: Configure, pairs_file: Path) -> None:
    config = configure(train_file=pairs_file)
    train_dir = prepare(config).train_dir
    for labels, kind, words in (
        ([], pa.uint16(), "holds no rows"),
        ([["a"]], pa.string(), "labels is list, not token ids"),
        ([None], pa.uint16(), "labels is NoneType"),
    ):
        inputs = pa.array([[3]] * len(labels), pa.list_(pa.uint16()))
        table = pa.table({"input_ids": inputs, "labels": pa.array(labels, pa.list_(kind))})
        with pa.ipc.new_file(str(train_dir / "00000.arrow"), table.schema) as file:
            file.write_table(table)
        with pytest.raises(UserError, match=words):
            loader_of(train_dir, "pairs", config).batch_of(np.array([0]))
