"""Is a record batch what it says it is? Arrow takes its lengths and offsets on trust, and follows them out of the file.

An Arrow file is mapped, not parsed: a flipped bit in an offset is met when its row is read, by a crash of the interpreter
that no `except` sees. So each batch from outside is validated once before a value of it is touched. Texts are checked as
bytes: whether they are UTF-8 is found cell by cell, so that one bad text is one bad row.

Source: Arrow columnar format, "Security considerations": a reader validates what it does not trust.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

OBJECT_BYTES = 64  # of a value in Python, beside its letters
_AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def checked(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Pick columns of a batch whose lengths, offsets and indices all point inside their buffers.

    Args:
        columns: names, each of which the batch has once.
    Raises:
        pa.ArrowInvalid: one does not.
    Memory: none; 1 microsecond and the time to read the offsets.
    """
    if batch.num_rows < 0:
        raise pa.ArrowInvalid(f"a batch has {batch.num_rows} rows")
    places = [batch.schema.get_field_index(name) for name in columns]
    picked = batch.select(places)
    for column in picked.columns:
        _check(column)
    return picked


def _check(column: pa.Array) -> None:
    column.validate()  # without a look at the data, which `view` needs
    if pa.types.is_dictionary(column.type):
        _check(column.dictionary)
        words = column.dictionary.view(_as_bytes(column.dictionary.type))
        column = pa.DictionaryArray.from_arrays(column.indices, words, safe=False)
    else:
        column = column.view(_as_bytes(column.type))
    column.validate(full=True)


def unfolded_bytes(column: pa.Array) -> int:
    """About what the values of an array take as Python objects: what lies there once may be in any number of them.

    Memory: numbers of its lists and codes.
    """
    kind = column.type
    own = len(column) * OBJECT_BYTES
    if pa.types.is_dictionary(kind):
        if not (pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)):
            return own
        lengths = pc.binary_length(column.dictionary.view(_as_bytes(kind.value_type)))
        return own + int(pc.sum(lengths.take(column.indices)).as_py() or 0)
    if pa.types.is_map(kind):
        entries = slice(column.offsets[0].as_py(), column.offsets[-1].as_py()) if len(column) else slice(0)
        sides = column.keys[entries], column.items[entries]
        return own + len(sides[0]) * OBJECT_BYTES + sum(map(unfolded_bytes, sides))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return own + unfolded_bytes(column.flatten())
    if pa.types.is_struct(kind):
        return own + sum(unfolded_bytes(field) for field in column.flatten())
    return own + int(column.nbytes)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """The same type with bytes in the place of texts, however deep they lie."""
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct(
            [kind.field(place).with_type(_as_bytes(kind.field(place).type)) for place in range(kind.num_fields)]
        )
    return _AS_BYTES.get(kind, kind)
