"""Some KiB that ask for gigabytes end the child that reads them, or are a bad row; a sentence names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from settings.errors import DoesNotFit
from support.child_process import MEMORY, ChildDied, call
from support.units import MIB

HUGE = 128 * MIB
ROOM = 96 * MIB


def rows_read(path: str) -> tuple[int, list[str]]:
    bad_rows = BadRows(skip=True)
    return sum(map(len, read_rows(find(path), ["text"], bad_rows))), bad_rows.examples


def parquet_cell(path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b" * HUGE]}), path, compression="snappy", write_statistics=False)


def brackets(path: Path) -> None:
    path.write_bytes(b'{"text": "a"}\n[' + b"[]," * (4 * MIB) + b"[]]\n")


@pytest.mark.parametrize(("write", "name"), [(parquet_cell, "a.parquet"), (brackets, "a.jsonl")])
def test_what_unpacks_to_more_than_there_is_room_for_names_the_file(
    tmp_path: Path, write: Callable[[Path], None], name: str
) -> None:
    path = tmp_path / name
    write(path)
    assert path.stat().st_size < 16 * MIB
    try:
        call(rows_read, str(path), max_bytes=ROOM, is_quiet=True)
    except DoesNotFit as error:
        assert str(path) in str(error)
    except ChildDied as died:  # A library that cannot allocate may end its process.
        assert died.reason == MEMORY
    else:
        pytest.fail("it was read")


def test_a_line_of_any_length_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "' + b"a" * HUGE + b'"}\n{"text": "b"}\n')
    rows, (example,) = call(rows_read, str(path), max_bytes=ROOM)
    assert rows == 2
    assert "line 2" in example
    assert "is longer than 16 MiB" in example
