"""Where in an Arrow file are the bytes of one row, so that these alone can be read?

Arrow reads whole record batches, or maps files. For plain columns (numbers, lists of numbers and texts, without nulls,
not compressed) a row is two offsets and a range of values at places that are known once its batch has been seen: then a row
costs two small reads, whatever the batch, and leaves neither heap nor mapped pages behind.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.packed.room import fits, reading_room
from data.sources.arrow_checks import unfolded_bytes
from units import format_size

UNKNOWN, OTHERWISE = -1, -2  # a batch that has not been seen; one that must be read by Arrow


class RangeIndex:
    """Places of the offsets and values of plain columns, batch by batch, as they become known.

    Args:
        schema: of the file; num_batches: in it.
    Memory:
        24 bytes a batch and column that was read.
    """

    def __init__(self, schema: pa.Schema, num_batches: int) -> None:
        self._schema, self._num_batches = schema, num_batches
        self._formats = {field.name: _format(field.type) for field in schema if schema.names.count(field.name) == 1}
        self._places: dict[str, NDArray[np.int64]] = {}

    def _column(self, name: str) -> NDArray[np.int64]:
        if name not in self._places:
            self._places[name] = np.full((self._num_batches, 3), UNKNOWN, np.int64)
        return self._places[name]

    def knows(self, number: int, columns: Sequence[str]) -> bool:
        """Whether all these columns of a batch can be read by range."""
        return all(self._formats[name] is not None and self._column(name)[number, 0] >= 0 for name in columns)

    def learn(self, number: int, batch: pa.RecordBatch, file: pa.MemoryMappedFile, columns: Sequence[str]) -> None:
        """Note where the buffers of some columns of a batch lie in the mapped file that it was read from."""
        file.seek(0)
        begin = file.read_buffer(1).address
        end = begin + file.size()
        for name in columns:
            places = self._column(name)
            if self._formats[name] is None or places[number, 0] != UNKNOWN:
                continue
            column = batch.column(name)
            buffers = column.buffers()
            offsets, values = buffers[1], buffers[-1]  # the same buffer for numbers
            has_nulls = column.null_count or (len(buffers) == 4 and column.flatten().null_count)
            if has_nulls or column.offset or offsets is None or values is None:
                places[number] = OTHERWISE
            elif begin <= offsets.address < end and begin <= values.address <= end:
                places[number] = offsets.address - begin, values.address - begin, values.size
            else:  # unpacked into memory
                places[number] = OTHERWISE

    def read(self, handle: io.FileIO, name: str, number: int, inside: int) -> Any:
        """Read one cell: a number, a numpy array or a string.

        Raises:
            pa.ArrowInvalid: the offsets make no sense.
        """
        offset_dtype, value_dtype, finish = self._formats[name]  # type: ignore[misc]
        offsets_at, values_at, size = self._places[name][number].tolist()
        if offset_dtype is None:
            return finish(_values(handle, values_at, inside, 1, value_dtype))
        bounds = _values(handle, offsets_at, inside, 2, offset_dtype)
        first, last = int(bounds[0]), int(bounds[1])
        item = np.dtype(value_dtype).itemsize
        if not 0 <= first <= last <= size // item:
            raise pa.ArrowInvalid("an offset points outside of its values")
        return finish(_values(handle, values_at, first, last - first, value_dtype))


def _values(handle: io.FileIO, begin: int, first: int, count: int, dtype: Any) -> NDArray[Any]:
    values = np.empty(count, dtype)
    handle.seek(begin + first * values.itemsize)
    if handle.readinto(values) != values.nbytes:  # type: ignore[arg-type]
        raise pa.ArrowInvalid("the file ends within a row")
    return values


Format = tuple[Any, Any, Callable[[NDArray[Any]], Any]]


def _format(kind: pa.DataType) -> Format | None:
    """Types of offsets and of values, and what becomes of the values; None for a column that Arrow must read."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return (np.int64 if pa.types.is_large_string(kind) else np.int32), np.uint8, _text
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and is_number(kind.value_type):
        return (np.int64 if pa.types.is_large_list(kind) else np.int32), kind.value_type.to_pandas_dtype(), _same
    if is_number(kind):
        return None, kind.to_pandas_dtype(), _only
    return None


def _text(values: NDArray[np.uint8]) -> str:
    return values.tobytes().decode("utf8")


def _only(values: NDArray[Any]) -> Any:
    return values[0].item()


def _same(values: NDArray[Any]) -> NDArray[Any]:
    return values


def is_number(kind: pa.DataType) -> bool:
    """Whether a type is one that numpy holds as it is."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def plain(column: pa.Array | pa.ChunkedArray, place: int) -> Any:
    """Copy a value out of an array: lists of numbers as numpy arrays, all else as Python values.

    Raises:
        pa.ArrowInvalid: it takes more than there is room for.
    """
    scalar, kind = column[place], column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not _is_nested(kind) or not scalar.is_valid:
        return scalar.as_py()
    if is_list and is_number(kind.value_type) and not scalar.values.null_count:
        return scalar.values.to_numpy(zero_copy_only=False).copy()
    row = column.slice(place, 1)
    if not fits(size := unfolded_bytes(row.chunk(0) if isinstance(row, pa.ChunkedArray) else row)):
        raise pa.ArrowInvalid(f"a cell takes {format_size(size)}, and there is room for {format_size(reading_room())}")
    return scalar.as_py()


def _is_nested(kind: pa.DataType) -> bool:
    """Whether a cell may hold many values."""
    while isinstance(kind, (pa.DictionaryType, pa.RunEndEncodedType, pa.BaseExtensionType)):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    return bool(pa.types.is_nested(kind))
