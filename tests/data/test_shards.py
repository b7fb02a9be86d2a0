from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.dataset import LowMemDataset
from data.shards import BATCH_ROWS, FORMAT, MANIFEST, PAIRS, ROW_TOKENS, STREAM, Manifest, is_shards
from data.spool import Column, Spool
from settings import UserError


def joined(rows: list[np.ndarray]) -> Column:
    return np.concatenate(rows).astype(np.int32), np.array([len(row) for row in rows], np.int64)


@pytest.mark.parametrize("vocab_size, dtype", [(384, np.uint16), (2**16, np.uint16), (2**16 + 1, np.int32)])
@pytest.mark.parametrize("step", [1, 7, 700])
def test_rows_come_back_from_several_files(tmp_path: Path, vocab_size: int, dtype: type, step: int) -> None:
    rows = [(np.arange(number % 11), np.full(3, vocab_size - 1)) for number in range(700)]
    with Spool(tmp_path / "train", PAIRS, vocab_size, shard_rows=256) as spool:
        for first in range(0, 700, step):
            part = rows[first : first + step]
            spool.add([joined([inputs for inputs, _ in part]), joined([labels for _, labels in part])])
        spool.finish()
    assert spool.num_rows == 700
    assert spool.shards == [{"file": f"0000{n}.arrow", "rows": rows} for n, rows in enumerate((256, 256, 188))]
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [f"0000{n}.arrow" for n in range(3)]
    dataset = LowMemDataset(tmp_path / "train")
    for index, (inputs, labels) in enumerate(rows):
        row = dataset[index]
        assert row["input_ids"].tolist() == inputs.tolist() and row["labels"].tolist() == labels.tolist()
        assert row["labels"].dtype == dtype


def test_a_stream_is_cut_into_rows_whatever_comes_at_once(tmp_path: Path) -> None:
    tokens = np.arange(ROW_TOKENS * 5 + 17, dtype=np.int32) % 300
    for name, pieces in (("one", [tokens]), ("many", np.array_split(tokens, 97))):
        with Spool(tmp_path / name, STREAM, 384, shard_rows=2) as spool:
            for piece in pieces:
                spool.add([(piece, np.array([len(piece)]))])
            spool.finish()
        assert [shard["rows"] for shard in spool.shards] == [2, 2, 2]
        rows = [row["tokens"] for row in LowMemDataset(tmp_path / name)]
        assert [len(row) for row in rows] == [ROW_TOKENS] * 5 + [17]
        assert np.concatenate(rows).tolist() == tokens.tolist()


def test_a_spool_goes_back_to_its_last_state(tmp_path: Path) -> None:
    ids, lengths = np.arange(90, dtype=np.int32), np.full(30, 3)
    with Spool(tmp_path, PAIRS, 384, shard_rows=64) as spool:
        for _ in range(3):
            spool.add([(ids, lengths), (ids, lengths)])
        state = json.loads(json.dumps(spool.state()))
        for _ in range(3):
            spool.add([(ids + 1, lengths), (ids + 1, lengths)])
    with Spool(tmp_path, PAIRS, 384, 64, state) as again:
        again.add([(ids, lengths), (ids, lengths)])
        again.finish()
    assert np.concatenate([row["labels"] for row in LowMemDataset(tmp_path)]).tolist() == ids.tolist() * 4


def test_batches_are_small(tmp_path: Path) -> None:
    with Spool(tmp_path, PAIRS, 384, shard_rows=10**6) as spool:
        spool.add([joined([np.arange(5)] * 300)] * 2)
        spool.finish()
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
