from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.batches.loader import StepLoader
from data.dataset import LowMemDataset
from data.prepare.child import ROOT
from data.prepare.preparing import Prepared, prepare
from data.prepare.spool import Column, Spool
from data.shards import checksums
from data.shards.store import BATCH_ROWS, FORMAT, MANIFEST, PAIRS, ROW_TOKENS, STREAM, Manifest, check_shards, is_shards
from settings.errors import UserError
from tests.data.conftest import Configure


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
    assert [(shard["file"], shard["rows"]) for shard in spool.shards] == [
        ("00000.arrow", 256), ("00001.arrow", 256), ("00002.arrow", 188),
    ]  # fmt: skip
    for shard in spool.shards:
        assert shard["crc32"] == zlib.crc32((tmp_path / "train" / shard["file"]).read_bytes())
    assert sorted(path.name for path in (tmp_path / "train").glob("[!.]*")) == [f"0000{n}.arrow" for n in range(3)]
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


SPLIT = {
    "counts": {"rows": 1}, "lengths": {"tokens": {"longest": 3, "longest_uncut": 3, "mean": 3.0, "histogram": [[3, 1]]}},
    "parts": [{"name": "", "rows": 1, "tokens": 3}], "shards": [{"file": "a", "rows": 1}],
}  # fmt: skip
TOKENIZER = {"fingerprint": "0", "size": 9, "pad_id": 0, "eos_id": 1, "unk_id": 2, "sentinel_ids": [8]}


def manifest(folder: Path, **changes: object) -> Path:
    content = {
        "format": FORMAT, "kind": STREAM, "fingerprint": "0", "dropped": {}, "tokenizer": TOKENIZER,
        "splits": {"train": SPLIT},
    }  # fmt: skip
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


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"kind": "songs"}, "kind is none of stream, pairs, preferences"),
        ({"tokenizer": {**TOKENIZER, "sentinel_ids": [8, "x"]}}, "sentinel_ids is no whole number"),
        ({"splits": {}}, "splits is no table of names"),
        ({"splits": {"train": {**SPLIT, "shards": [{"file": "../../etc/passwd", "rows": 1}]}}}, "file is not what"),
        ({"dropped": None}, "dropped is no table"),
    ],
)
def test_a_manifest_that_lacks_something_says_what(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=rf"manifest\.json: {told}"):
        Manifest.read(manifest(tmp_path, **changes))


def prepared(configure: Configure, text_file: Path) -> Prepared:
    return prepare(configure(train_file=text_file).changed(shard_rows=16))


def test_a_flipped_bit_in_a_shard_is_told_before_the_first_row(
    configure: Configure, text_file: Path, pairs_file: Path
) -> None:
    made = prepared(configure, text_file)
    assert check_shards(made.train_dir, made.validation_dir) == []
    shards = sorted(made.train_dir.glob("*.arrow"))
    assert len(shards) > 2
    for shard in shards[:2]:
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    with pytest.raises(UserError) as caught:
        check_shards(made.train_dir, forget_pages=True)
    assert len(caught.value.problems) == 2
    for shard, problem in zip(shards, caught.value.problems, strict=False):
        assert str(shard) in problem and "is damaged, its checksum" in problem


def test_a_file_is_read_for_its_checksum_once_in_a_process(
    configure: Configure, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prepared(configure, text_file)
    check_shards(made.train_dir)
    monkeypatch.setattr(checksums, "_crc32_of", None)
    check_shards(made.train_dir)
    with pytest.raises(TypeError):
        check_shards(made.validation_dir)


def test_shards_without_checksums_are_read_and_told(configure: Configure, text_file: Path) -> None:
    made = prepared(configure, text_file)
    path = made.train_dir.parent / MANIFEST
    content = json.loads(path.read_text())
    for split in content["splits"].values():
        for shard in split["shards"]:
            del shard["crc32"]
    path.write_text(json.dumps(content))
    assert ["have no checksums" in note for note in check_shards(made.train_dir)] == [True]


MEMORY_OF_CHECKING = """
import sys
from pathlib import Path
from data.shards.checksums import ShardFile, check_sums
held = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = held()
check_sums([ShardFile(Path(sys.argv[1]), 1, int(sys.argv[2]))], "")
print((held() - before) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to measure memory")
def test_a_checksum_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(64 * 2**20))
    command = [sys.executable, "-c", MEMORY_OF_CHECKING, str(tmp_path / "large"), str(zlib.crc32(bytes(64 * 2**20)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 4, f"{done.stdout} MiB"


@pytest.mark.parametrize("objective, column", [("span", "tokens"), ("pairs", "labels")])
def test_an_id_behind_the_vocabulary_is_told_with_its_row(
    configure: Configure, text_file: Path, pairs_file: Path, objective: str, column: str
) -> None:
    config = configure(train_file=pairs_file if objective == "pairs" else text_file, objective=objective)
    made = prepare(config)
    path = made.train_dir.parent / MANIFEST
    content = json.loads(path.read_text())
    content["tokenizer"]["size"] = 100  # as if the ids of the bytes above 96 were damage
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"train, row \d+: \w+ holds the id \d+, the tokenizer has ids 0 to 99"):
        StepLoader(made.train_dir, made.objective, config).micro_batches(0, effective_batch_size=8, batch_size=8)


def test_a_split_without_rows_or_with_other_columns_is_told(configure: Configure, pairs_file: Path) -> None:
    config = configure(train_file=pairs_file)
    made = prepare(config)
    shard = made.train_dir / "00000.arrow"
    for labels, told in (([], "holds no rows"), ([["a"]], "labels is list, not token ids"), ([None], "labels is null")):
        kind = pa.list_(pa.string() if labels == [["a"]] else pa.uint16())
        table = pa.table({"input_ids": [[3]] * len(labels), "labels": pa.array(labels, kind)})
        table = table.cast(table.schema.set(0, pa.field("input_ids", pa.list_(pa.uint16()))))
        with pa.OSFile(str(shard), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(UserError, match=told):
            StepLoader(made.train_dir, "pairs", config).batch_of(np.array([0]))
