"""Sound files of data, for `child` to damage."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.fuzzing.sound_tokenizers import TEXTS

TABLE = pa.table(
    {
        "text": TEXTS,
        "prompt": pa.array(TEXTS).dictionary_encode(),
        "ids": pa.array([list(range(number % 9)) for number in range(60)], pa.list_(pa.uint16())),
        "maybe": pa.array([None if number % 3 else [1.5, None] for number in range(60)], pa.list_(pa.float32())),
        "messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": str(n)}] for n in range(60)],
    }
)
PLAIN = TABLE.drop_columns(["prompt"])  # a stream with dictionaries has no rows by number


def write_ipc(path: Path, table: pa.Table, new: Any, **options: Any) -> None:
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table, max_chunksize=16)


def jsonl(path: Path) -> None:
    rows = [{"prompt": text, "response": text[::-1], "text": text} for text in TEXTS[:20]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def delimited(path: Path) -> None:
    mark = "\t" if ".tsv" in path.name else ","
    rows = [("prompt", "response"), *((text, f'"{number}, x"') for number, text in enumerate(TEXTS[:20]))]
    path.write_text("".join(mark.join(row) + "\n" for row in rows), encoding="utf8")


def packed(
    write: Callable[[Path], None], pack: Callable[[bytes], bytes] = lambda content: gzip.compress(content, mtime=0)
) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        write(path)
        path.write_bytes(pack(path.read_bytes()))

    return make


def zstandard(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def saved_dataset(folder: Path) -> None:
    folder.mkdir()
    write_ipc(folder / "data.arrow", PLAIN, pa.ipc.new_stream)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}], "_format_type": None}))
