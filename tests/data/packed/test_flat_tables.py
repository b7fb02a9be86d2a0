"""What a schema points to again and again is counted as often as a reader copies it."""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa
import pytest

from data.dataset import LowMemDataset
from data.packed import room
from data.packed.flat_tables import FIELD_FACTS, Table, described_bytes, within
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from settings.errors import UserError
from units import MIB

HEADER_OF_MESSAGE, SCHEMA_OF_FOOTER, FIELDS_OF_SCHEMA = 2, 1, 1


def written(path: Path, schema: pa.Schema, is_stream: bool) -> bytes:
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with make(str(path), schema) as file:
        file.write_table(pa.table([pa.array(["a"])] * len(schema), schema=schema))
    return path.read_bytes()


def with_fields(raw: bytes, where: int, count: int) -> bytes:
    """A description whose list of fields has its first one so many times; `where` is the schema in it."""
    schema = Table.root(within(raw)).table(where)
    assert schema is not None
    at, (begin, _) = schema.field(FIELDS_OF_SCHEMA), schema.vector(FIELDS_OF_SCHEMA)
    field = begin + schema.number(begin, "I")
    head = bytearray(raw + bytes(-len(raw) % 8))
    again = len(head) + 4 + 4 * count + 4 * (count % 2 == 0)
    again += -again % 8
    struct.pack_into("<I", head, at, len(head) - at)
    places = [again + field - (len(head) + 4 + 4 * number) for number in range(count)]
    made = bytes(head) + struct.pack(f"<I{count}I", count, *places)
    made += bytes(again - len(made)) + raw
    return made + bytes(-len(made) % 8)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_name_that_many_fields_share_is_refused(tmp_path: Path, is_stream: bool) -> None:
    path = tmp_path / "a.arrow"
    raw = written(path, pa.schema({"a" * MIB: pa.string()}), is_stream)
    if is_stream:
        length = struct.unpack("<I", raw[4:8])[0]
        many = with_fields(raw[8 : 8 + length], HEADER_OF_MESSAGE, 200)
        path.write_bytes(raw[:4] + struct.pack("<I", len(many)) + many + raw[8 + length :])
        assert len(pa.ipc.open_stream(path.read_bytes()).schema) == 200
    else:
        length = struct.unpack("<I", raw[-10:-6])[0]
        many = with_fields(raw[-10 - length : -10], SCHEMA_OF_FOOTER, 200)
        path.write_bytes(raw[: -10 - length] + many + struct.pack("<I", len(many)) + b"ARROW1")
        assert len(pa.ipc.open_file(path.read_bytes()).schema) == 200
    room.keep_to(300 * MIB)
    for way in (lambda: list(read_rows(find(str(path)), ["text"], BadRows())), lambda: LowMemDataset(path)):
        with pytest.raises(UserError, match=r"its schema unpacks to .* there is room for 96.0 MiB"):
            way()


def test_fields_pairs_and_time_zones_are_counted() -> None:
    inner = pa.struct({"b": pa.timestamp("s", "Europe/Berlin"), "cd": pa.list_(pa.int8())})
    schema = pa.schema([pa.field("a", inner, metadata={"key": "value"})], metadata={"k": "v" * 100})
    raw = schema.serialize().to_pybytes()
    message = Table.root(within(raw[8:]))
    described = message.table(HEADER_OF_MESSAGE)
    assert described is not None
    sizes = list(described_bytes(described))
    assert sum(size >= FIELD_FACTS for size in sizes) == 4
    texts = sum(size % FIELD_FACTS if size >= FIELD_FACTS else size for size in sizes)
    assert texts == (1 + 1 + 2 + 4) + len("Europe/Berlin") + (96 + 8) + (96 + 101)
