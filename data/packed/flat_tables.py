"""What do the tables of a FlatBuffer hold, and what does a reader make of an Arrow schema in one?

A table points forward to texts and other tables, and any number of places may point to the same one: a list of fields costs
four bytes a field, whatever the name and the children of the field that all of them are. So what a reader copies is counted.

Source: FlatBuffers, "Internals"; Arrow columnar format, `Schema.fbs`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa

_FIELDS, _SCHEMA_PAIRS = 1, 2  # of a Schema
_NAME, _TYPE_KIND, _TYPE, _CHILDREN, _FIELD_PAIRS = 0, 2, 3, 5, 6  # of a Field
_TIMESTAMP, _TIMEZONE = 10, 1  # a kind of type, and its field
_KEY, _VALUE = 0, 1  # of a pair
FIELD_FACTS, PAIR_FACTS = 320, 96  # bytes that a reader takes, beside texts
DEEPEST = 128  # fields inside each other, as Arrow has it
Read = Callable[[int, int], bytes]


class Table(NamedTuple):
    """A table of a FlatBuffer: how its bytes are read, and where it begins."""

    read: Read
    at: int

    @classmethod
    def root(cls, read: Read) -> Table:
        """The table that a description begins with."""
        return cls(read, struct.unpack("<I", read(0, 4))[0])

    def number(self, at: int, kind: str) -> int:
        """The number at a place."""
        return int(struct.unpack(f"<{kind}", self.read(at, struct.calcsize(kind)))[0])

    def field(self, field: int) -> int:
        """Where a field's value lies; 0 where it has none."""
        vtable = self.at - self.number(self.at, "i")
        if 4 + 2 * field + 2 > self.number(vtable, "H"):
            return 0
        offset = self.number(vtable + 4 + 2 * field, "H")
        return self.at + offset if offset else 0

    def value(self, field: int, kind: str) -> int:
        """The number in a field; 0 where there is none."""
        at = self.field(field)
        return self.number(at, kind) if at else 0

    def table(self, field: int) -> Table | None:
        """The table in a field."""
        at = self.field(field)
        return Table(self.read, at + self.number(at, "I")) if at else None

    def text_bytes(self, field: int) -> int:
        """Bytes of the text in a field."""
        at = self.field(field)
        return self.number(at + self.number(at, "I"), "I") if at else 0

    def tables(self, field: int) -> Iterator[Table]:
        """The tables in a list, any of which may be the same one."""
        begin, count = self.vector(field)
        for at in range(begin, begin + 4 * count, 4):
            yield Table(self.read, at + self.number(at, "I"))

    def vector(self, field: int) -> tuple[int, int]:
        """Where the members of a list lie, and how many there are."""
        if not (at := self.field(field)):
            return 0, 0
        begin = at + self.number(at, "I")
        return begin + 4, self.number(begin, "I")


def within(raw: bytes) -> Read:
    """How the bytes of a description are read, and none outside of it."""

    def read(place: int, size: int) -> bytes:
        if not 0 <= place <= place + size <= len(raw):
            raise pa.ArrowInvalid("a description points outside of itself")
        return raw[place : place + size]

    return read


def described_bytes(schema: Table) -> Iterator[int]:
    """What a reader takes for each field and pair of a schema, as often as it is there."""
    yield from pairs_bytes(schema, _SCHEMA_PAIRS)
    for field in schema.tables(_FIELDS):
        yield from _field_bytes(field, 0)


def _field_bytes(field: Table, depth: int) -> Iterator[int]:
    if depth > DEEPEST:
        raise pa.ArrowInvalid("fields lie too deep in each other")
    yield FIELD_FACTS + field.text_bytes(_NAME)
    if field.value(_TYPE_KIND, "B") == _TIMESTAMP and (kind := field.table(_TYPE)) is not None:
        yield kind.text_bytes(_TIMEZONE)
    yield from pairs_bytes(field, _FIELD_PAIRS)
    for child in field.tables(_CHILDREN):
        yield from _field_bytes(child, depth + 1)


def pairs_bytes(table: Table, field: int) -> Iterator[int]:
    """The same for keys with their values."""
    for pair in table.tables(field):
        yield PAIR_FACTS + pair.text_bytes(_KEY) + pair.text_bytes(_VALUE)
