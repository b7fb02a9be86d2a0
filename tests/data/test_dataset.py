from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import MODES, LowMemDataset, TokenStream
from settings.declared import ROOT
from settings.errors import UserError

N = 1000
TABLE = pa.table(
    {
        "number": pa.array(range(N)),
        "text": [f"row {number} " * (number % 5) for number in range(N)],
        "ids": pa.array([list(range(number % 9)) for number in range(N)], pa.list_(pa.uint16())),
        "maybe": pa.array([None if number % 3 == 0 else [1.5, None] for number in range(N)], pa.list_(pa.float32())),
        "nested": [{"a": [str(number)]} for number in range(N)],
    }
)


def packed(file: pa.NativeFile, schema: pa.Schema) -> Any:
    return pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))


WRITERS = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream, "packed": packed}


def write(path: Path, kind: str, table: pa.Table = TABLE, batch_rows: int = 128) -> Path:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=batch_rows)
        return path
    with pa.OSFile(str(path), "wb") as file, WRITERS[kind](file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


@pytest.fixture(params=["file", "stream", "parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / f"a.{request.param}", request.param)


def text_of(index: int) -> str:
    return f"row {index} " * (index % 5)


@pytest.mark.parametrize("mode", MODES)
def test_rows_come_as_plain_values(path: Path, mode: str) -> None:
    dataset = LowMemDataset(path, mode=mode)
    assert len(dataset) == N and dataset.columns == TABLE.column_names
    for index in np.random.default_rng(0).integers(N, size=60):
        row = dataset[index]
        assert row["number"] == index and type(row["number"]) is int
        assert row["text"] == text_of(index) and type(row["text"]) is str
        assert row["ids"].dtype == np.uint16 and row["ids"].tolist() == list(range(index % 9))
        assert row["ids"].flags.owndata and row["ids"].flags.writeable
        assert row["maybe"] == (None if index % 3 == 0 else [1.5, None])
        assert row["nested"] == {"a": [str(index)]}


@pytest.mark.parametrize("mode", MODES)
def test_what_stays_in_memory_is_bounded(tmp_path: Path, mode: str) -> None:
    def bytes_after(rows: int) -> int:
        path = write(tmp_path / "a.arrow", "packed", pa.table({"text": ["x" * 1000] * rows}), rows)
        dataset = LowMemDataset(path, mode=mode)
        before = pa.total_allocated_bytes()
        assert dataset[1] == dataset[rows - 1]
        return pa.total_allocated_bytes() - before

    assert bytes_after(80_000) < 1024**2, "the batch is larger than all that may stay"
    assert (bytes_after(1000) > 500_000) == (mode != "reopen")


def test_files_of_all_kinds_follow_each_other(tmp_path: Path) -> None:
    paths = [write(tmp_path / kind, kind) for kind in ("stream", "parquet", "file")]
    dataset = LowMemDataset(paths, ["number"])
    assert len(dataset) == 3 * N
    for index in (N - 1, N, 2 * N - 1, 2 * N, 3 * N - 1):
        assert dataset[index]["number"] == index % N


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_empty_files_and_batches_hold_no_rows(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "a.arrow", kind, TABLE.slice(0, 0))
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, WRITERS[kind](file, TABLE.schema) as writer:
        for start, rows in ((0, 3), (0, 0), (3, 5), (0, 0)):
            columns = TABLE.slice(start, rows).combine_chunks().to_pydict()
            writer.write_batch(pa.record_batch(columns, schema=TABLE.schema))
    assert [row["number"] for row in LowMemDataset(tmp_path, ["number"])] == list(range(8))


def _read_in_child(dataset: LowMemDataset, queue: Any) -> None:
    queue.put([dataset[index]["number"] for index in (1, 500, N - 1)])


def test_it_survives_forks_and_pickles(path: Path) -> None:
    dataset = LowMemDataset(path, ["number"])
    assert dataset[5]["number"] == 5  # A handle is open now.
    assert pickle.loads(pickle.dumps(dataset))[7] == {"number": 7}
    assert dataset[6]["number"] == 6
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_read_in_child, args=(dataset, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=30) for _ in processes] == [[1, 500, N - 1]] * 2
    for process in processes:
        process.join()
    assert dataset[8]["number"] == 8


def test_problems_are_user_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", "file")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    for kind in ("file", "parquet"):
        content = write(tmp_path / kind, kind).read_bytes()
        (tmp_path / kind).write_bytes(content[: len(content) // 2])
    for problem, arguments in {
        r"column tokens is missing; columns: number, text": {"columns": ["tokens"]},
        "mode = fast, is not known; allowed: mmap, file, reopen": {"mode": "fast"},
        "contradicts ultra_low_mem": {"ultra_low_mem": True, "mode": "mmap"},
        "no such file": {"path_or_paths": tmp_path / "missing.arrow"},
        "jsonl has no rows by number; turn it into shards": {"path_or_paths": tmp_path / "a.jsonl"},
        "file: is cut off or broken": {"path_or_paths": tmp_path / "file"},
        "parquet: is cut off or broken": {"path_or_paths": tmp_path / "parquet"},
    }.items():
        with pytest.raises(UserError, match=problem):
            LowMemDataset(**{"path_or_paths": path, **arguments})


MEMORY_OF_READS = """
import random, sys
from pathlib import Path
from data.dataset import LowMemDataset

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024

draw = random.Random(0)
def read(dataset, times):
    for _ in range(times):
        assert len(dataset[draw.randrange(len(dataset))]["text"]) > 100

for kind, mode in (("file", "mmap"), ("file", "reopen"), ("stream", "file")):
    dataset = LowMemDataset(Path(sys.argv[1]) / kind, mode=mode)
    read(dataset, 200)
    before = anonymous()
    read(dataset, int(sys.argv[2]))
    print(anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to measure memory")
@pytest.mark.parametrize("reads", [5_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_random_reads_leave_no_anonymous_memory(tmp_path: Path, reads: int) -> None:
    rows = [f"{number:04d}" + "x" * (100 + number % 300) for number in range(128)]
    batch = pa.record_batch({"prompt": [f"prompt {number}" for number in range(128)], "text": rows})
    for kind in ("file", "stream"):
        write(tmp_path / kind, kind, pa.Table.from_batches([batch] * 1500))
    command = [sys.executable, "-c", MEMORY_OF_READS, str(tmp_path), str(reads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert max(map(float, done.stdout.split())) <= 5.0, f"{done.stdout} MiB more after {reads} reads"


def stream_of(lengths: list[int]) -> list[dict[str, Any]]:
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    return [{"tokens": row} for row in np.split(tokens, np.cumsum(lengths)[:-1])]


def test_windows_cover_the_stream_in_order() -> None:
    window = 7
    stream = TokenStream(stream_of([16, 16, 16, 5]), window)
    assert len(stream) == 53 // window
    joined = np.concatenate([stream[index]["tokens"] for index in range(len(stream))])
    assert joined.dtype == np.int64 and joined.tolist() == list(range(53 // window * window))
    with pytest.raises(IndexError):
        stream[len(stream)]
    short = TokenStream(stream_of([5]), window)
    assert len(short) == 1 and short[0]["tokens"].tolist() == [0, 1, 2, 3, 4]
