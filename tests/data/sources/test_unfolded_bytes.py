"""What cells take as Python objects is known before they are made, of every kind that Arrow has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import LowMemDataset
from data.sources.arrow_checks import OBJECT_BYTES, unfolded_bytes
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import read_rows

LONG, MANY = "a" * 1000, 50
CODES, OFFSETS = pa.array([0] * MANY, pa.int32()), pa.array([0, MANY], pa.int32())


def views() -> pa.Array:
    """Fifty rows that share one text of a view."""
    cells = np.zeros(MANY, [("length", "<i4"), ("begin", "S4"), ("buffer", "<i4"), ("offset", "<i4")])
    cells["length"], cells["begin"] = len(LONG), LONG[:4].encode()
    buffers = [None, pa.py_buffer(cells.tobytes()), pa.py_buffer(LONG.encode())]
    return pa.Array.from_buffers(pa.string_view(), MANY, buffers)


def coded(values: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(CODES, values)


SHARED = {
    "views": views(), "codes": coded(pa.array([LONG])), "codes of views": coded(pa.array([LONG], pa.string_view())),
    "codes of bytes": coded(pa.array([LONG.encode()])), "codes of lists": coded(pa.array([[LONG]])),
    "list of views": pa.ListArray.from_arrays(OFFSETS, views()),
    "list of a fixed size": pa.FixedSizeListArray.from_arrays(views(), MANY),
    "views of lists": pa.ListViewArray.from_arrays(CODES, pa.array([1] * MANY, pa.int32()), pa.array([LONG])),
    "views of numbers": pa.ListViewArray.from_arrays(CODES, pa.array([100] * MANY, pa.int32()), pa.array([7] * 100)),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([MANY], pa.int32()), pa.array([LONG])),
    "union": pa.UnionArray.from_dense(pa.array([0] * MANY, pa.int8()), CODES, [pa.array([LONG])]),
    "map": pa.MapArray.from_arrays(OFFSETS, views(), CODES),
    "own kind": pa.ExtensionArray.from_storage(pa.json_(pa.string_view()), views()),
    "table": pa.StructArray.from_arrays([views()], ["a"]),
}  # fmt: skip


def taken(value: Any) -> int:
    """Letters and objects of a plain value."""
    if isinstance(value, (list, tuple)):
        return OBJECT_BYTES + sum(map(taken, value))
    if isinstance(value, dict):
        return OBJECT_BYTES + sum(map(taken, value.values()))
    return OBJECT_BYTES + (len(value) if isinstance(value, (str, bytes)) else 0)


@pytest.mark.parametrize("kind", SHARED)
def test_what_lies_there_once_counts_wherever_it_is_meant(kind: str) -> None:
    array = SHARED[kind]
    array.validate(full=True)
    assert unfolded_bytes(array) >= sum(map(taken, array.to_pylist())) * 0.9
    assert unfolded_bytes(array.slice(0, 0)) == 0


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_of_a_slice_its_own_rows_count(kind: pa.DataType) -> None:
    array = pa.array(["ab", None, "c", "d" * 100, "ab"], kind)
    assert unfolded_bytes(array.slice(0, 3)) == 3 * OBJECT_BYTES + 3
    assert unfolded_bytes(array.slice(3)) == 2 * OBJECT_BYTES + 102


def test_tables_that_are_maps_are_read(tmp_path: Path) -> None:
    cells = pa.array([[("en", "cat"), ("de", "Katze")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"translation": cells}), tmp_path / "a.parquet")
    found = list(read_rows(find(str(tmp_path / "a.parquet")), ["translation.en", "translation.de"], BadRows()))
    assert found == [[("cat", "Katze")]]
    assert LowMemDataset(tmp_path / "a.parquet")[0]["translation"] == [("en", "cat"), ("de", "Katze")]
