from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.dataset import LowMemDataset
from data.shards import BATCH_ROWS, FORMAT, MANIFEST, PAIRS, STREAM, Manifest, ShardWriter, is_shards
from settings import UserError


@pytest.mark.parametrize("vocab_size, dtype", [(384, np.uint16), (2**16, np.uint16), (2**16 + 1, np.int32)])
def test_rows_come_back_from_several_files(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    rows = [(np.arange(number % 11), np.full(3, vocab_size - 1)) for number in range(700)]
    with ShardWriter(tmp_path / "train", PAIRS, vocab_size, shard_rows=256) as writer:
        for row in rows:
            writer.add(*row)
        writer.finish()
    assert writer.num_rows == 700
    assert writer.shards == [{"file": f"0000{n}.arrow", "rows": rows} for n, rows in enumerate((256, 256, 188))]
    dataset = LowMemDataset(tmp_path / "train")
    for index, (inputs, labels) in enumerate(rows):
        row = dataset[index]
        assert row["input_ids"].tolist() == inputs.tolist() and row["labels"].tolist() == labels.tolist()
        assert row["labels"].dtype == dtype


def test_batches_are_small(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, STREAM, 384, shard_rows=10**6) as writer:
        for _ in range(300):
            writer.add(np.arange(5))
        writer.finish()
    with pa.memory_map(str(tmp_path / "00000.arrow")) as file:
        reader = pa.ipc.open_file(file)
        assert [reader.get_batch(n).num_rows for n in range(3)] == [BATCH_ROWS, BATCH_ROWS, 300 - 2 * BATCH_ROWS]


def manifest(folder: Path, **changes: object) -> Path:
    content = {
        "format": FORMAT,
        "kind": STREAM,
        "splits": {"train": {"counts": {"rows": 1}, "shards": [{"file": "a"}]}},
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
    with pytest.raises(UserError, match="is no shards folder"):
        Manifest.read(tmp_path)
    with pytest.raises(UserError, match="of another format"):
        Manifest.read(manifest(tmp_path, format=0))
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        Manifest.read(tmp_path)
    found = Manifest.read(manifest(tmp_path))
    with pytest.raises(UserError, match=r"a: is missing"):
        found.files("train")
    with pytest.raises(UserError, match="holds no validation rows, only train; name others with --validation_file"):
        found.files("validation")
