"""What does a Parquet column unpack to, whatever the file's footer says of it? Its page headers tell, without a page unpacked.

A reader takes the memory that a page's header asks for, so the headers are walked first, from each to the next. Facts about a
column are taken out of the footer here as well: asking pyarrow for those of a broken footer ends the interpreter.

Source: Apache Parquet format, `parquet.thrift`: FileMetaData, ColumnMetaData, PageHeader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data.packed.room import check_unpacked, fits
from data.packed.thrift import I32, I64, Fields, NoThrift, Tally, read_struct
from data.sources.places import Place
from formats import ENCRYPTED
from settings.errors import UserError

# {number of a field: its type}, by parquet.thrift
_FOOTER = {4: {1: {3: {5: I64, 7: I64, 9: I64, 11: I64}, 8: {}}}}  # row_groups: columns: meta_data, crypto_metadata
_VALUES, _CHUNK_BYTES, _DATA, _DICTIONARY = 5, 7, 9, 11
_HEADER = {1: I32, 2: I32, 3: I32, 5: {1: I32, 2: I32}, 8: {1: I32, 4: I32}}  # data pages: num_values, encoding
_TYPE, _UNPACKED, _PACKED = 1, 2, 3
_DATA_PAGES = {0: 5, 3: 8}  # type of a page, of the first and second version -> its field
_ENCODINGS = ((5, 2), (8, 4))
DELTAS = frozenset((5, 6, 7))  # of Encoding: DELTA_BINARY_PACKED, DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY
FIRST_BYTES, LONGEST_HEADER = 512, 16 * 1024**2
PADDING = 100  # bytes that old writers left out of a chunk's length (PARQUET-816)
FOOTER_TIMES = 12  # as large as a footer are the facts that are made of it, where it is written as usual
COLUMN_FACTS, CHUNK_FACTS = 1536, 1024  # bytes of the facts about a column, and about a column of a row group
PAIR_FACTS, NAME_FACTS = 160, 32  # about a key and its value, and a name; of each any number lie in a few bytes
TIMES = 4  # as large as a page is what reading it takes: packed values are copied out of it, and into arrays that grow

FAR_READERS = 16
LEVEL_BYTES = (
    16  # of a value in a list: how deep it lies, where it begins, and itself; any number of them lie in few bytes
)


class Chunk(NamedTuple):
    """Where the pages of one column of one row group lie, how many values they have, and whether a key is needed."""

    begin: int
    end: int
    values: int
    is_encrypted: bool = False


@dataclass(frozen=True)
class Pages:
    """What the page headers of a chunk say.

    Args:
        largest: bytes of its largest page, packed and unpacked. unpacked: bytes of all pages, and of the largest one.
        values, most_values: of all pages, and of one. widest: bytes of a value, on the average of the page where they are longest.
        encodings: how values are told. in_lists: bytes that all values take beside what they are, where they lie in lists.
    """

    largest: int
    unpacked: tuple[int, int]
    values: int
    most_values: int
    widest: float
    encodings: frozenset[int]
    in_lists: int = 0

    @property
    def in_delta(self) -> bool:
        """Whether a text may be told as the one before, and so much more."""
        return not DELTAS.isdisjoint(self.encodings)


def check_footer(path: Place) -> None:
    """See that a file's footer can be read in the room there is.

    Raises:
        UserError: it cannot. pa.ArrowInvalid, OSError: the file is broken.
    """
    state = path.stat()
    with _opened(path) as file:
        length = _footer_bytes(file, state.st_size)
    check_unpacked(path, "its footer", length, FOOTER_TIMES * length)
    if not fits(length * COLUMN_FACTS):
        columns, chunks, takes = _footer_facts(path, state.st_size, state.st_mtime_ns)
        check_unpacked(path, f"its footer ({columns:,} columns, {chunks:,} of row groups)", length, takes)


def check_groups(path: Place, file: pq.ParquetFile, columns: Sequence[str]) -> None:
    """The same as `check_group` for all row groups, many at once: of an address, where each header takes its time."""
    numbers = range(file.metadata.num_row_groups)
    if numbers:
        check_group(path, file, 0, columns)  # the footer is then known to all
    with ThreadPoolExecutor(FAR_READERS) as pool:
        for _ in pool.map(lambda number: check_group(path, file, number, columns), numbers):
            pass


def check_group(path: Place, file: pq.ParquetFile, number: int, columns: Sequence[str]) -> dict[str, Pages]:
    """See that some columns of a row group can be read in the room there is.

    Returns:
        what the pages of each of their leaves say, by its path.
    Raises:
        UserError: they cannot. pa.ArrowInvalid: the file is broken.
    Memory: a page header, and 150 bytes a column and row group.
    """
    leaves, found, takes = file.metadata.schema, dict[str, Pages](), 0
    wanted = [place for place in range(len(leaves)) if leaves.column(place).path.split(".")[0] in columns]
    state = path.stat()
    for place in wanted:
        pages = _pages(path, state.st_size, state.st_mtime_ns, number, place)
        is_list = leaves.column(place).max_repetition_level > 0
        found[leaves.column(place).path] = replace(pages, in_lists=LEVEL_BYTES * pages.values * is_list)
        in_lists = LEVEL_BYTES * pages.most_values * is_list
        takes += TIMES * pages.largest + in_lists
        where = f"row group {number + 1}, column {leaves.column(place).path}, a page"
        check_unpacked(path, where, max(pages.unpacked[1], in_lists), takes)
    return found


@lru_cache(maxsize=4096)
def _pages(path: Place, size: int, changed: int, group: int, column: int) -> Pages:
    with _opened(path) as file:
        groups = _chunks(path, size, changed)
        chunk = groups[group][column] if group < len(groups) and column < len(groups[group]) else None
        if chunk is None:
            raise pa.ArrowInvalid("a row group lacks a column")
        if chunk.is_encrypted:
            raise UserError(f"{path}: {ENCRYPTED}")
        largest = total = most = values = most_values = 0
        widest, encodings = 0.0, set()
        for header, count in _headers(file, chunk):
            unpacked = header[_UNPACKED]
            largest, most = max(largest, unpacked + header[_PACKED]), max(most, unpacked)
            total, values, most_values = total + unpacked, values + count, max(most_values, count)
            widest = max(widest, unpacked / count if count else 0)
            encodings |= {header.get(kind, {}).get(place) for kind, place in _ENCODINGS}
        return Pages(largest, (total, most), values, most_values, widest, frozenset(encodings))


def _headers(file: Any, chunk: Chunk) -> Iterator[tuple[dict[int, Any], int]]:
    """The header of each page, and how many values the page has; a dictionary counts none."""
    at, seen = chunk.begin, 0
    while at < chunk.end and seen < chunk.values:
        header, at = _header(file, at, chunk.end)
        if not _is_whole(header):
            raise pa.ArrowInvalid("a page has a header of another form")
        if min(header.get(_UNPACKED, -1), header.get(_PACKED, -1)) < 0:
            raise pa.ArrowInvalid("a page has no size")
        count = header.get(_DATA_PAGES.get(header.get(_TYPE, -1), 0), {}).get(1, 0)
        if count < 0:
            raise pa.ArrowInvalid("a page has less than no values")
        yield header, count
        at, seen = at + header[_PACKED], seen + count


def _is_whole(header: dict[int, Any]) -> bool:
    """Whether numbers are numbers and structs are structs: damaged bytes may say that either is a list."""
    numbers = [header.get(field, 0) for field in (_TYPE, _UNPACKED, _PACKED)]
    structs = [header.get(field, {}) for field, _ in _ENCODINGS]
    if not all(isinstance(struct, dict) for struct in structs):
        return False
    return all(
        isinstance(each, int) for each in (*numbers, *(value for struct in structs for value in struct.values()))
    )


def _header(file: Any, at: int, end: int) -> tuple[dict[int, Any], int]:
    """A page's header, and where the page begins."""
    size = FIRST_BYTES
    while True:
        file.seek(at)
        raw = file.read(min(size, end - at))
        try:
            header, used = read_struct(raw, 0, _HEADER)
        except NoThrift as error:
            raise pa.ArrowInvalid(f"a page has no header ({error})") from None
        except IndexError:
            if len(raw) < size or size >= LONGEST_HEADER:
                raise pa.ArrowInvalid("a page's header does not end") from None
            size *= 8
        else:
            return header, at + used


@lru_cache(maxsize=4)
def _chunks(path: Place, size: int, changed: int) -> list[list[Chunk | None]]:
    """The chunks of all columns of all row groups, as Arrow finds them."""
    footer = _read_footer(path, size, _FOOTER)
    try:
        return [[_chunk(column.get(3, {}), size, 8 in column) for column in group[1]] for group in footer.get(4, [])]
    except KeyError as error:
        raise pa.ArrowInvalid(f"the footer is broken ({error})") from None


@lru_cache(maxsize=64)
def _footer_facts(path: Place, size: int, changed: int) -> tuple[int, int, int]:
    """Columns, columns of row groups, and bytes of all facts that a reader makes of a footer. Memory: the footer."""
    columns, pairs, names = Tally(), Tally(), Tally()  # pairs of the file and of all columns together
    chunks = Tally({3: Tally({3: names, 8: pairs})})
    _read_footer(path, size, Tally({2: columns, 4: Tally({1: chunks}), 5: pairs}))
    takes = COLUMN_FACTS * columns.members + CHUNK_FACTS * chunks.members
    return columns.members, chunks.members, takes + PAIR_FACTS * pairs.members + NAME_FACTS * names.members


def _read_footer(path: Place, size: int, fields: Fields) -> dict[int, Any]:
    """The wanted fields of a footer."""
    with _opened(path) as file:
        length = _footer_bytes(file, size)
        file.seek(size - 8 - length)
        raw = file.read(length)
    try:
        return read_struct(raw, 0, fields)[0]
    except (NoThrift, IndexError) as error:
        raise pa.ArrowInvalid(f"the footer is broken ({error})") from None


def _footer_bytes(file: Any, size: int) -> int:
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    if length + 8 > size:
        raise pa.ArrowInvalid("the footer is longer than the file")
    return length


def _chunk(facts: dict[int, int], size: int, is_encrypted: bool) -> Chunk | None:
    if is_encrypted:
        return Chunk(0, 0, 0, True)
    if not {_VALUES, _CHUNK_BYTES, _DATA} <= facts.keys():
        return None
    begin = facts[_DATA]
    if 0 < facts.get(_DICTIONARY, 0) < begin:
        begin = facts[_DICTIONARY]
    return Chunk(begin, min(size, begin + facts[_CHUNK_BYTES] + PADDING), facts[_VALUES])


@contextmanager
def _opened(path: Place) -> Iterator[Any]:
    with path.open("rb") if not isinstance(path, Path) else open(path, "rb", buffering=0) as file:
        yield file
