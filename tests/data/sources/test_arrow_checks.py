"""A batch whose lengths, offsets or indices lead out of its buffers is refused before a value of it is touched."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import LowMemDataset
from data.sources.arrow_checks import OBJECT_BYTES, checked, unfolded_bytes

ROWS = 4321  # a number that stands nowhere else in the messages below
TEXTS = ["river", "hill", None, "河"]


class Damaged:
    """Numbers that lie in a buffer, sound while an array is made of them (Arrow looks at the ends) and changed afterwards."""

    def __init__(self, *sound: int) -> None:
        self.numbers = np.array(sound, np.int32)
        self.buffer = pa.py_buffer(self.numbers)


def texts(offsets: Damaged) -> pa.Array:
    """Texts of 9 letters in all, which end where the offsets say."""
    return pa.StringArray.from_buffers(len(offsets.numbers) - 1, offsets.buffer, pa.py_buffer(b"riverhill"))


def listed(items: pa.Array, offsets: Damaged) -> pa.Array:
    return pa.Array.from_buffers(
        pa.list_(items.type), len(offsets.numbers) - 1, [None, offsets.buffer], children=[items]
    )


def coded(words: pa.Array, codes: Damaged) -> pa.Array:
    indices = pa.Array.from_buffers(pa.int32(), len(codes.numbers), [None, codes.buffer])
    return pa.DictionaryArray.from_arrays(indices, words, safe=False)


def struct_of(items: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([items], names=["de"])


def batch_of(column: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(range(len(column))), column], names=["id", "text"])


WORDS = pa.array(["river", "hill"])
BEHIND, BELOW = (0, 90, 9), (0, -4, 9)  # where the first of two texts ends
DAMAGED: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Damaged], pa.Array]]] = {
    "a text ends behind its buffer": ((0, 5, 9), BEHIND, texts),
    "a text ends before its buffer": ((0, 5, 9), BELOW, texts),
    "the last text ends behind its buffer": ((0, 5, 9), (0, 5, 10), texts),
    "in a list": ((0, 5, 9), BEHIND, lambda damaged: listed(texts(damaged), Damaged(0, 1, 2))),
    "a list ends behind its items": ((0, 1, 2), (0, 20, 2), lambda damaged: listed(WORDS, damaged)),
    "in a list of lists": (
        (0, 5, 9), BEHIND, lambda damaged: listed(listed(texts(damaged), Damaged(0, 1, 2)), Damaged(0, 1, 2)),
    ),
    "in a struct": ((0, 5, 9), BEHIND, lambda damaged: struct_of(texts(damaged))),
    "in a list of structs": ((0, 5, 9), BEHIND, lambda damaged: listed(struct_of(texts(damaged)), Damaged(0, 1, 2))),
    "in a dictionary": ((0, 5, 9), BEHIND, lambda damaged: coded(texts(damaged), Damaged(0, 1))),
    "a code without a word": ((0, 1), (0, 7), lambda damaged: coded(WORDS, damaged)),
    "a code below none": ((0, 1), (0, -3), lambda damaged: coded(WORDS, damaged)),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_column_is_refused(how: str) -> None:
    sound, flipped, column_of = DAMAGED[how]
    numbers = Damaged(*sound)
    batch = batch_of(column_of(numbers))
    assert checked(batch, ["text"]).num_rows == 2
    numbers.numbers[:] = flipped
    with pytest.raises(pa.ArrowInvalid):
        checked(batch, ["text"])


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(), pa.large_string(), pa.string_view(), pa.list_(pa.string()), pa.large_list(pa.string()), pa.list_(pa.string(), 1),
        pa.struct([("de", pa.string()), ("n", pa.int64())]), pa.list_(pa.struct([("content", pa.large_string())])),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)  # fmt: skip
def test_sound_columns_of_every_kind_stay_what_they_are(kind: pa.DataType) -> None:
    def value(of: pa.DataType, text: str | None) -> object:
        if pa.types.is_struct(of):
            return {field.name: text if field.name != "n" else 3 for field in of}
        return [value(of.value_type, text)] if hasattr(of, "value_field") else text

    column = pa.array([value(kind, text) for text in TEXTS], kind)
    picked = checked(batch_of(column), ["text"])
    assert picked.schema.names == ["text"] and picked.column(0).to_pylist() == column.to_pylist()


def test_a_text_that_is_not_utf8_is_left_to_its_row() -> None:
    column = pa.StringArray.from_buffers(2, Damaged(0, 2, 6).buffer, pa.py_buffer(b"\xff\xfehill"))
    assert checked(batch_of(column), ["text"]).column(0).cast(pa.binary())[1].as_py() == b"hill"


def test_a_batch_that_claims_less_than_no_rows() -> None:
    """Flipped numbers in the message of an Arrow stream; where batch and columns do not agree, Arrow refuses it itself."""
    sink = pa.BufferOutputStream()
    table = batch_of(pa.array(["hill"] * ROWS))
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_batch(table)
    written, rows, fewer = sink.getvalue().to_pybytes(), struct.pack("<q", ROWS), struct.pack("<q", -1)
    assert written.count(rows) == 3, "of the batch, and of both columns"
    with pytest.raises(pa.ArrowInvalid, match="a batch has -1 rows"):
        checked(pa.ipc.open_stream(written.replace(rows, fewer)).read_next_batch(), ["text"])
    with pytest.raises(OSError, match="did not match"):
        pa.ipc.open_stream(written.replace(rows, fewer, 1)).read_next_batch()


def test_values_are_counted_as_often_as_they_are_written_out() -> None:
    word = "x" * 1000
    assert unfolded_bytes(coded(pa.array([word, "y"]), Damaged(*[0] * 100, 1))) == 101 * OBJECT_BYTES + 100_001
    assert unfolded_bytes(coded(pa.array([7, 8]), Damaged(0, 1, 1))) == 3 * OBJECT_BYTES


@pytest.mark.parametrize(
    ("kind", "value", "objects"),
    [
        (pa.string(), "x" * 1000, 1), (pa.list_(pa.string()), ["x" * 500] * 2, 3), (pa.large_list(pa.string()), ["x" * 500] * 2, 3),
        (pa.struct([("a", pa.string()), ("b", pa.string())]), {"a": "x" * 900, "b": "x" * 100}, 3),
        (pa.map_(pa.string(), pa.string()), [("a" * 400, "x" * 600)], 4),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_nested_values_are_counted_with_what_is_in_them(kind: pa.DataType, value: object, objects: int) -> None:
    size = unfolded_bytes(pa.array([value] * 50, kind))
    least = 50 * (1000 + objects * OBJECT_BYTES)
    assert least <= size <= 1.1 * least, "letters and objects, and little beside: offsets and marks of nulls"
    assert unfolded_bytes(pa.array([value] * 50, kind).slice(7, 1)) <= 1.1 * least / 50, "a row is that row alone"
    assert unfolded_bytes(pa.array([], kind)) == 0


def test_a_dataset_gives_rows_with_maps(tmp_path: Path) -> None:
    rows = [{"facts": [("k", "v")]}, {"facts": [("x", "y"), ("z", None)]}, {"facts": None}]
    pq.write_table(
        pa.Table.from_pylist(rows, pa.schema({"facts": pa.map_(pa.string(), pa.string())})), tmp_path / "a.parquet"
    )
    assert [LowMemDataset(tmp_path / "a.parquet")[place] for place in range(3)] == rows
