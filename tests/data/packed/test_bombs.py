"""Some KiB that ask for gigabytes: a sentence says what is wrong, and next to no memory is taken before."""

from __future__ import annotations

import gzip
import json
import lzma
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import LowMemDataset
from data.packed import room
from data.packed.parquet_pages import CHUNK_FACTS
from data.sources.files import find
from data.sources.layouts import Columns
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from data.sources.tables import open_parquet, parquet_batch_rows
from settings.errors import UserError
from tests.measuring import in_child
from units import MIB

BIG = 64 * MIB
CHILD = """
from config import DataConfig
from data.dataset import LowMemDataset
from data.packed.room import keep_to
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.prompts import read_prompts
from data.sources.reading import read_rows
from settings.errors import UserError

keep_to(400 * 2**20)
refused = 0
paths, shared = sys.argv[3:], sys.argv[1:3]

def read():
    global refused
    for path in paths:
        for way in (lambda: list(read_rows(find(path), ["text"], BadRows(skip=True))), lambda: LowMemDataset(path)[0]):
            try:
                way()
            except UserError as error:
                refused += "there is room for" in str(error)

def prompts():
    global rows
    for path in shared:
        for prompt in read_prompts(find(path), DataConfig(), BadRows()):
            rows += len(prompt.text) > 900_000

def read_shared():
    global rows
    for path in shared:
        rows += sum(len(batch) for batch in read_rows(find(path), ["prompt"], BadRows()))

rows = 0
print(measure(read), refused, measure(prompts), measure(read_shared), rows)
"""


def long_text() -> pa.Table:
    return pa.table({"text": pa.array(["a" * BIG, "b"])})


def write_arrow(path: Path, table: pa.Table, codec: str | None, stream: bool = False) -> Path:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as file:
        file.write_table(table)
    return path


def sharing(size: int) -> pa.Table:
    """A hundred rows of one text, which is there once."""
    return pa.table({"prompt": pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int32()), pa.array(["a" * size]))})


def test_a_packed_cell_of_any_kind_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    table, paths = long_text(), []
    for codec in ("zstd", "gzip"):
        for dictionary, version in ((False, "1.0"), (True, "2.0")):
            paths.append(tmp_path / f"{codec}{dictionary}{version}.parquet")
            facts = {"compression": codec, "use_dictionary": dictionary, "data_page_version": version}
            pq.write_table(table, paths[-1], write_statistics=False, **facts)
    for codec in ("zstd", "lz4"):
        paths += [write_arrow(tmp_path / f"{codec}.arrow", table, codec)]
        paths += [write_arrow(tmp_path / f"stream-{codec}.arrow", table, codec, stream=True)]
    coded = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["a" * 2 * BIG]))})
    paths += [write_arrow(tmp_path / "codes.arrow", coded, "zstd")]
    paths = [path for path in paths if path.stat().st_size < 2 * MIB]
    shared = [write_arrow(tmp_path / f"prompts-{size}.arrow", sharing(size), "zstd") for size in (4 * MIB, 900_001)]
    taken, refused, more, read, rows = in_child(CHILD, *shared, *paths)
    assert refused == 2 * len(paths) and len(paths) == 9
    assert taken < BIG // 4, "nothing was unpacked, by either way in"
    assert rows == 400 and max(more, read) < 100 * MIB, "rows that share one text come one by one, and not as 400 MiB"


def test_what_there_is_room_for_is_read_and_the_rest_named_with_its_place(tmp_path: Path) -> None:
    rows = ["a"] * 10 + ["a" * 30 * MIB]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", compression="zstd", row_group_size=10)
    bad = BadRows(skip=True)
    assert sum(len(batch) for batch in read_rows(find(str(tmp_path / "a.parquet")), ["text"], bad)) == 10
    assert bad.count == 1
    room.keep_to(300 * MIB)
    with pytest.raises(UserError, match=r"row group 2, column text, a page unpacks to 30.0 MiB, .* room for 96.0 MiB"):
        list(read_rows(find(str(tmp_path / "a.parquet")), ["text"], bad))
    assert LowMemDataset(tmp_path / "a.parquet")[9]["text"] == "a", "the group before it"
    table = pa.table({"text": ["a", "b" * 60 * MIB]})
    with pa.ipc.new_file(
        str(tmp_path / "a.arrow"), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as file:
        file.write_table(table, max_chunksize=1)
    with pytest.raises(UserError, match=r"batch 2 unpacks to 60.0 MiB"):
        list(read_rows(find(str(tmp_path / "a.arrow")), ["text"], bad))


def test_what_the_footer_says_of_a_column_is_not_believed(tmp_path: Path) -> None:
    """A footer with the sizes of a small file, and the pages of a large one."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": ["a" * 40 * MIB]}), path, compression="zstd", use_dictionary=False, write_statistics=False
    )
    raw = path.read_bytes()
    size = pq.ParquetFile(path).metadata.row_group(0).column(0).total_uncompressed_size
    told, less = (_varint(2 * value) for value in (size, size % 2**21 | 2**21 - 1))
    at = (
        raw.rindex(b"PAR1", 0, len(raw) - 4)
        if raw.count(b"PAR1") > 2
        else len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    )
    footer = raw[at:-8].replace(told, less + b"" if len(less) == len(told) else told)
    path.write_bytes(raw[:at] + footer + raw[-8:])
    room.keep_to(300 * MIB)
    with pytest.raises(UserError, match=r"unpacks to 40.0 MiB"):
        list(read_rows(find(str(path)), ["text"], BadRows()))


def _varint(value: int) -> bytes:
    found = b""
    while value >= 128:
        found, value = found + bytes([value % 128 + 128]), value // 128
    return found + bytes([value])


def test_a_footer_of_columns_without_number_is_refused(tmp_path: Path) -> None:
    """Three bytes stand for a column of a row group, of which a reader makes a kilobyte."""
    columns = 2**17
    assert columns * CHUNK_FACTS > 96 * MIB
    group = b"\x19\xfc" + _varint(columns) + b"\x26\x00\x00" * columns + b"\x16\x00\x16\x02\x00"
    write_footer(tmp_path / "a.parquet", b"\x19\x2c" + ROOT + LEAF + b"\x16\x02\x19\x1c" + group)
    room.keep_to(300 * MIB)
    with pytest.raises(
        UserError, match=r"its footer \(2 columns, 131,072 of row groups\) .* there is room for 96.0 MiB"
    ):
        LowMemDataset(tmp_path / "a.parquet")


ROOT, LEAF = b"\x48\x01r\x15\x02\x00", b"\x15\x0c\x25\x00\x18\x01a\x00"


def write_footer(path: Path, fields: bytes) -> None:
    footer = b"\x15\x02" + fields + b"\x00"
    path.write_bytes(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1")


@pytest.mark.parametrize("what", ["columns", "pairs", "names"])
def test_a_footer_of_other_facts_without_number_is_refused(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of eight bytes becomes a kilobyte and a half, a name of one byte becomes 32."""
    monkeypatch.setattr(room, "LEAST_ROOM", 4 * MIB)
    columns, pairs, names = b"\x19\x2c" + ROOT + LEAF, b"\x16\x00\x19\x0c", 40_000
    if what == "columns":
        columns = b"\x19\xfc" + _varint(2**12) + ROOT + LEAF * (2**12 - 1)
    elif what == "pairs":
        pairs += b"\x19\xfc" + _varint(2**15) + b"\x18\x00\x00" * 2**15
    else:
        facts = (
            b"\x15\x0c\x19\x05\x19\xf8"
            + _varint(names)
            + bytes(names)
            + b"\x15\x00\x16\x00\x16\x00\x16\x00\x26\x00\x00"
        )
        pairs = b"\x16\x00\x19\x1c" + b"\x19\x4c" + (b"\x26\x08\x1c" + facts + b"\x00") * 4 + b"\x16\x00\x16\x00\x00"
    write_footer(tmp_path / "a.parquet", columns + pairs)
    room.keep_to(300 * MIB)
    with pytest.raises(UserError, match=r"its footer \(.* there is room for 4.0 MiB"):
        LowMemDataset(tmp_path / "a.parquet")


def test_one_text_that_a_list_has_any_number_of_times_is_a_bad_row(tmp_path: Path) -> None:
    text, codes = pa.array(["a" * MIB]), pa.array([0] * 200, pa.int32())
    cells = pa.ListArray.from_arrays(pa.array([0, 200], pa.int32()), pa.DictionaryArray.from_arrays(codes, text))
    path = write_arrow(tmp_path / "a.arrow", pa.table({"text": cells}), "zstd")
    bad = BadRows(skip=True)
    assert not list(read_rows(find(str(path)), Columns((), "text"), bad))
    assert bad.count == 1 and "is longer than 16 MiB" in bad.examples[0]
    room.keep_to(300 * MIB)
    with pytest.raises(UserError, match=r"a cell takes 200.0 MiB, and there is room for 96.0 MiB"):
        LowMemDataset(path)[0]
    values = 2**23
    short = pa.DictionaryArray.from_arrays(pa.array(np.zeros(values, np.int32)), pa.array(["user"]))
    cells = pa.ListArray.from_arrays(pa.array([0, values], pa.int32()), short)
    pq.write_table(pa.table({"text": cells}), tmp_path / "a.parquet", compression="zstd", store_schema=False)
    with pytest.raises(UserError, match=r"column text.list.element, a page unpacks to 128.0 MiB"):
        list(read_rows(find(str(tmp_path / "a.parquet")), Columns((), "text"), bad))


def test_rows_of_long_lists_come_few_at_a_time(tmp_path: Path) -> None:
    """Any number of like values lie in few bytes of a page, which says how many they are."""
    rows, values = 16, 2**17
    short = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows * values, np.int8)), pa.array(["user"]))
    cells = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * values, pa.int32()), short)
    pq.write_table(pa.table({"text": cells}), tmp_path / "a.parquet", compression="zstd", store_schema=False)
    with open_parquet(tmp_path / "a.parquet") as file:
        assert parquet_batch_rows(tmp_path / "a.parquet", file, ["text"], 256) <= 4, "of 2 MiB each"


def test_a_row_of_csv_that_does_not_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of it is long, and no cell."""
    monkeypatch.setattr("data.sources.reading.LONGEST_LINE_BYTES", 64 * 1024)
    (tmp_path / "a.csv").write_bytes(b'text,b\n1,2\n"' + b'\n","' * 2**15 + b'"\n')
    bad = BadRows(skip=True)
    rows = [row for batch in read_rows(find(str(tmp_path / "a.csv")), ["text"], bad) for row in batch]
    assert rows[0] == ("1",) and "is longer than" in bad.examples[0] and "a quote may be missing" in bad.examples[0]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_line_of_nothing_but_brackets_is_told(tmp_path: Path, kind: str) -> None:
    many = 2**21
    cells = b'{"text": "b", "more": [' + b"[]," * many + b"0]}"
    text = {"jsonl": b'{"text": "a"}\n' + cells, "json": b"[" + cells + b"]", "csv": b"text\na\n" + b"," * many}[kind]
    path = tmp_path / (f"a.{kind}" if kind == "json" else f"a.{kind}.gz")
    path.write_bytes(text + b"\n" if kind == "json" else gzip.compress(text + b"\n", 1))
    bad = BadRows(skip=True)
    room.keep_to(300 * MIB)
    try:
        told = [str(row) for batch in read_rows(find(str(path)), ["text"], bad) for row in batch] + bad.examples
    except UserError as error:
        told = error.problems
    assert "so many values that there is no room for them" in told[-1]


def test_xz_is_read_on_and_on_but_gets_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    rows = b"".join(json.dumps({"text": f"row {row}"}).encode() + b"\n" for row in range(3000))
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress(rows[:9999]) + bytes(8) + lzma.compress(rows[9999:]) + bytes(4))
    found = [row for batch in read_rows(find(str(path)), ["text"], BadRows()) for row in batch]
    assert found == [(f"row {row}",) for row in range(3000)]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cut off or broken"):
        list(read_rows(find(str(path)), ["text"], BadRows()))
    path.write_bytes(_asking_for(lzma.compress(rows, preset=0), 37))  # 1.5 GiB
    room.keep_to(300 * MIB)
    with pytest.raises(UserError, match=r"asks for more than 96.0 MiB to be unpacked into"):
        list(read_rows(find(str(path)), ["text"], BadRows()))


def _asking_for(packed: bytes, size: int) -> bytes:
    """The same with another size of the dictionary in its first block's header."""
    raw = bytearray(packed)
    end = 12 + (raw[12] + 1) * 4
    raw[raw.index(b"\x21\x01", 12, end) + 2] = size
    raw[end - 4 : end] = struct.pack("<I", zlib.crc32(bytes(raw[12 : end - 4])))
    return bytes(raw)
