"""Some KiB that ask for gigabytes end the child that reads them, or are a bad row; a sentence names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.child_process import MEMORY, ChildDied, call
from common.units import MIB
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from settings.errors import DoesNotFit

HUGE, ROOM = 320 * MIB, 128 * MIB


def rows_read(path: str) -> tuple[int, list[str]]:
    bad_rows = BadRows(skip=True)
    return sum(map(len, read_rows(find(path), ["text"], bad_rows))), bad_rows.examples


def parquet_cell(path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b" * HUGE]}), path, compression="zstd", write_statistics=False)


def arrow_cell(path: Path) -> None:
    table, options = pa.table({"text": ["a", "b" * HUGE]}), pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(path), table.schema, options=options) as file:
        file.write_table(table)


def shared_text(path: Path) -> None:
    """256 rows of one text of 4 MiB, which is there once."""
    cells = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["a" * 4 * MIB]))
    pq.write_table(pa.table({"text": cells}), path, compression="zstd", store_schema=False)


def brackets(path: Path) -> None:
    path.write_bytes(b'{"text": "a"}\n[' + b"[]," * (4 * MIB) + b"[]]\n")


@pytest.mark.parametrize("write", [parquet_cell, arrow_cell, shared_text, brackets])
def test_what_unpacks_to_more_than_there_is_room_for_names_the_file(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    path = tmp_path / ("a.jsonl" if write is brackets else "a.parquet" if write is not arrow_cell else "a.arrow")
    write(path)
    assert path.stat().st_size < 16 * MIB
    try:
        call(rows_read, str(path), max_bytes=ROOM, is_quiet=True)
    except DoesNotFit as error:
        assert str(path) in str(error)
    except ChildDied as died:  # a library that cannot allocate may end its process
        assert died.reason == MEMORY
    else:
        pytest.fail("it was read")


def test_a_line_of_any_length_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.write('{"text": "a"}\n{"text": "')
        for _ in range(200):
            file.write("a" * 2**20)
        file.write('"}\n{"text": "b"}\n')
    rows, (example,) = call(rows_read, str(path), max_bytes=ROOM)
    assert rows == 2 and "line 2" in example and "is longer than 16 MiB" in example
