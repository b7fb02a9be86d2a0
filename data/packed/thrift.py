"""What do the structs in a Parquet file say? Thrift's compact protocol, as much of it as footer and page headers need.

Only the fields that are asked for are built, all others are passed over. What is asked for stands beside its type: a field
of another type counts as not there, as it does for Thrift's own readers.

Source: Apache Thrift, "Compact protocol encoding".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

I32, I64, BINARY = 5, 6, 8  # types of fields
_TRUE, _FALSE, _I8, _I16, _DOUBLE, _LIST, _SET, _MAP, _STRUCT, _UUID = 1, 2, 3, 4, 7, 9, 10, 11, 12, 13
_FIXED = {_TRUE: 1, _FALSE: 1, _I8: 1, _DOUBLE: 8, _UUID: 16}  # bytes of a value in a list
_VARINTS = (_I16, I32, I64)
DEEPEST, LONGEST_VARINT, MOST_FIELDS = 32, 10, 2**15
Fields = Mapping[int, Any]  # number of a field -> its type; of a struct or a list of them, their fields


class NoThrift(ValueError):
    """These bytes are no struct."""


class Tally(dict[int, "Tally"]):
    """Fields of which nothing is built; the members of the list that it stands for are counted, in all places where it is."""

    members = 0


def read_struct(raw: bytes, at: int, fields: Fields, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The wanted fields of the struct that begins at a byte, and where it ends.

    Args:
        fields: `{1: I64, 4: {3: I32}}` asks for a whole number, and for the third field of each struct in a list (or of one);
            a `Tally` in the place of a struct's fields counts.
    Raises:
        NoThrift: it is none. IndexError: it goes on behind the end of `raw`.
    """
    found: dict[int, Any] = {}
    number = 0
    while (head := raw[at]) & 0x0F:
        at, kind = at + 1, head & 0x0F
        if head >> 4:
            number += head >> 4
        else:
            number, at = _zigzag(raw, at)
        if not 0 < number < MOST_FIELDS:
            raise NoThrift(f"there is no field {number}")
        if kind in (_TRUE, _FALSE):  # which is its value
            continue
        wanted = fields.get(number)
        value, at = _value(raw, at, kind, wanted, depth)
        if isinstance(value, dict):
            found[number] = found.get(number, {}) | value  # told twice, both count
        elif value is not None:
            found[number] = value
    return found, at + 1


def _value(raw: bytes, at: int, kind: int, wanted: Any, depth: int) -> tuple[Any, int]:
    """A value of this type, None where it is not the wanted one, and where it ends."""
    if depth > DEEPEST:
        raise NoThrift("structs lie too deep in each other")
    if kind in _VARINTS:
        value, at = _zigzag(raw, at)
        value = (value + 2**31) % 2**32 - 2**31 if kind == I32 else value  # what lies above is cut off, as Thrift does
        return (value if wanted == kind else None), at
    if kind == BINARY:
        size, at = _varint(raw, at)
        return (raw[at : at + size] if wanted == BINARY else None), _within(raw, at + size)
    if kind == _STRUCT:
        is_wanted = isinstance(wanted, Mapping)
        found, at = read_struct(raw, at, wanted if is_wanted else {}, depth + 1)
        return (found if is_wanted and not isinstance(wanted, Tally) else None), at
    if kind in (_LIST, _SET):
        return _list(raw, at, wanted, depth)
    if kind == _MAP:
        return None, _after_map(raw, at, depth)
    if kind in _FIXED:
        return None, _within(raw, at + _FIXED[kind])
    raise NoThrift(f"there is no type {kind}")


def _list(raw: bytes, at: int, wanted: Any, depth: int) -> tuple[list[Any] | None, int]:
    size, kind = raw[at] >> 4, raw[at] & 0x0F
    at += 1
    if size == 15:
        size, at = _varint(raw, at)
    _within(raw, at + size)  # each takes a byte at least
    if isinstance(wanted, Tally):
        wanted.members += size
    values = []
    for _ in range(size):
        value, at = _value(raw, at, kind, wanted, depth + 1)
        if value is not None:
            values.append(value)
    return (values if len(values) == size and wanted is not None else None), at


def _after_map(raw: bytes, at: int, depth: int) -> int:
    size, at = _varint(raw, at)
    if size:
        kinds, at = raw[at], at + 1
        _within(raw, at + 2 * size)
        for _ in range(size):
            for kind in (kinds >> 4, kinds & 0x0F):
                at = _value(raw, at, kind, None, depth + 1)[1]
    return at


def _within(raw: bytes, at: int) -> int:
    if at > len(raw):
        raise IndexError(at)
    return at


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(LONGEST_VARINT):
        byte = raw[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise NoThrift("a number does not end")


def _zigzag(raw: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(raw, at)
    return value >> 1 ^ -(value & 1), at
