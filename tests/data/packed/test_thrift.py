"""Fields are read by number and type, others are passed over, and what is none is told."""

from __future__ import annotations

import pytest

from data.packed.thrift import BINARY, DEEPEST, I32, I64, NoThrift, Tally, read_struct


def test_wanted_fields_of_their_type_and_none_else() -> None:
    raw = b"\x15\x08" + b"\x26\x03" + b"\x18\x03abc" + b"\x11\x12" + b"\x17" + bytes(8) + b"\x00" + b"behind"
    fields = {1: I32, 3: I64, 4: BINARY, 5: I32, 7: I64}
    assert read_struct(raw, 0, fields) == ({1: 4, 3: -2, 4: b"abc"}, len(raw) - 6)
    assert read_struct(raw, 0, {1: I64, 3: I32, 4: I64})[0] == {}, "another type is not the field"


def test_structs_in_lists_and_maps() -> None:
    inner = b"\x15\x02\x00"
    raw = b"\x19\x2c" + inner + inner + b"\x1b\x01\x58" + b"\x02\x01x" + b"\x1c" + inner + b"\x19\x12\x01" + b"\x00"
    found, end = read_struct(raw, 0, {1: {1: I32}, 3: {1: I32}})
    assert found == {1: [{1: 1}, {1: 1}], 3: {1: 1}} and end == len(raw)


def test_members_of_lists_are_counted_and_not_built() -> None:
    inner = b"\x19\x38\x00\x00\x00\x00"  # a struct with three names
    names = Tally()
    structs = Tally({1: names})
    assert read_struct(b"\x19\x2c" + inner + inner + b"\x15\x08\x00", 0, {1: structs, 2: I32})[0] == {2: 4}
    assert structs.members == 2 and names.members == 6


def test_numbers_are_cut_off_as_thrift_does() -> None:
    more = b"\x15" + bytes([0x8A, 0x80, 0x80, 0x80, 0x20]) + b"\x00"  # 2^33 + 10
    assert read_struct(more, 0, {1: I32})[0] == {1: 5}


def test_a_field_that_is_told_twice_keeps_what_the_second_does_not_tell() -> None:
    raw = b"\x1c\x15\x02\x15\x04\x00" + b"\x0c\x02\x15\x06\x00" + b"\x00"
    assert read_struct(raw, 0, {1: {1: I32, 2: I32}})[0] == {1: {1: 3, 2: 2}}


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", IndexError), (b"\x15", IndexError), (b"\x18\x09abc\x00", IndexError), (b"\x19\xfc\xff\xff\x7f\x00", IndexError),
        (b"\x1b\xff\xff\x7f\x55\x00", IndexError), (b"\x17\x00", IndexError), (b"\x1f\x00\x00", NoThrift),
        (b"\x15" + b"\xff" * 10 + b"\x00", NoThrift), (b"\x05\x01\x00\x00", NoThrift), (b"\x1c" * (DEEPEST + 2), NoThrift),
    ],
)  # fmt: skip
def test_what_is_no_struct_is_told(raw: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_struct(raw, 0, {})
