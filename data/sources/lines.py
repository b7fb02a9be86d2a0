"""Text files line by line, packed or not, however long their lines and however broken."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from data.sources.formats import FORMATS
from data.sources.places import Place
from data.sources.source import Source
from settings.errors import UserError
from support.language import join, say

TEXT_PART_BYTES = 1024**2
LONGEST_LINE_BYTES = 16 * 1024**2  # also of a text in a table
REMOTE_BUFFER_BYTES = 1024**2  # One request to a service reads so much.
GBK_BYTES = 4096  # The beginning of a line tells whether it is GBK.
WINDOWS_REMEDY = "files saved by Excel are often Windows-1252 (iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW)"
GBK_REMEDY = "it looks like GBK: convert the whole file to UTF-8 (iconv -f GB18030 -t UTF-8 OLD > NEW)"
COMMON_CHINESE = re.compile("[\u4e00-\u9fa5，。！？：；、“”（）《》]")
ASCII = re.compile(r"[\x00-\x7f]+")
UNPACK: dict[str | None, Any] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
Item = TypeVar("Item")
Record = dict[str, Any]  # column -> cell; in place of one that could not be read a ValueError that says why


@dataclass
class BadRows:
    """What becomes of broken rows: the first one stops the reading, or all are counted.

    Args:
        skip: count and go on.
    """

    skip: bool = False
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, source: Source, number: int, problem: str) -> None:
        """Report one broken record, by the number that its reader gives it.

        Raises:
            UserError: unless `skip`.
        """
        if not self.skip:
            sentence = say(
                "{file}, {place}: {problem}", file=source.path, place=place_of(source, number), problem=problem
            )
            remedy = say("fix it, or use --skip_bad_rows=True to skip and count such rows")
            raise UserError(sentence if say(GBK_REMEDY) in problem else join("; ", [sentence, remedy]))
        self.note(source.path, place_of(source, number), problem)

    def note(self, path: Place | str, row: str, problem: str) -> None:
        """Count a row that nothing comes of, and go on; `row` names it."""
        self.count += 1
        if len(self.examples) < 3:
            self.examples.append(say("{file}, {place}: {problem}", file=path, place=row, problem=problem))

    def explain(self, problem: str) -> str:
        """A problem that is left when broken rows are passed over, with the first of them, which may be its cause."""
        if not self.examples:
            return problem
        return say("{problem}; the first broken row: {example}", problem=problem, example=self.examples[0])


@contextmanager
def _open(source: Source) -> Iterator[Any]:
    """The bytes of a file, unpacked."""
    with source.path.open("rb") as file:
        if source.compression in UNPACK:
            with UNPACK[source.compression](file, "rb") as unpacked:
                yield unpacked
        elif source.compression == "zstd":
            yield io.BufferedReader(pa.CompressedInputStream(file, "zstd"))
        else:
            yield file if isinstance(source.path, Path) else io.BufferedReader(file, REMOTE_BUFFER_BYTES)


def too_long() -> str:
    """What is wrong with a line or a text of `LONGEST_LINE_BYTES` or more."""
    return say("is longer than {size} MiB, too long for one row; split it", size=LONGEST_LINE_BYTES // 1024**2)


def place_of(source: Source, number: int) -> str:
    """Where a record is in its file, for messages: the number of its line, or of its row, from 1."""
    if FORMATS[source.kind].counts_lines:
        return say("line {number}", number=number)
    return say("row {number}", number=number)


def numbered_lines(source: Source, limit: int = LONGEST_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Number lines from 1; a line longer than `limit` comes in parts, each under the same number."""
    with _open(source) as file:
        number = 0
        is_at_line_end = True
        while line := file.readline(limit):
            number += is_at_line_end
            is_at_line_end = line.endswith(b"\n")
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def whole_lines(source: Source) -> Iterator[tuple[int, bytes | None]]:
    """Number lines from 1; None stands in place of one of `LONGEST_LINE_BYTES` or more."""
    long_line = 0
    for number, line in numbered_lines(source):
        if number == long_line:
            continue
        if len(line) >= LONGEST_LINE_BYTES:
            long_line = number
            yield number, None
        else:
            yield number, line


def decoded_lines(source: Source, bad_rows: BadRows) -> Iterator[str]:
    """Lines of plain text; of a line over 1 MiB, its parts."""
    number = 0
    decode = codecs.getincrementaldecoder("utf8")().decode
    for number, part in numbered_lines(source, TEXT_PART_BYTES):
        is_cut = len(part) >= TEXT_PART_BYTES  # A letter may go on in the next part.
        try:
            yield decode(part, final=not is_cut).rstrip("\r\n")
        except UnicodeDecodeError as error:
            bad_rows.add(source, number, not_utf8(error))
            decode = codecs.getincrementaldecoder("utf8")().decode
    try:
        decode(b"", final=True)
    except UnicodeDecodeError:
        bad_rows.add(source, number, say("ends within a letter of UTF-8"))


def not_utf8(error: UnicodeDecodeError) -> str:
    """Say where a line stops being UTF-8, and what it may be instead."""
    begin = say("is not UTF-8 (byte {place} of the line)", place=error.start + 1)
    return join("; ", [begin, encoding_of(error.object)])


def encoding_of(text: bytes) -> str:
    """What a text that is not UTF-8 may be, and how to convert it."""
    return say(GBK_REMEDY if is_gbk(text) else WINDOWS_REMEDY)


def is_gbk(text: bytes) -> bool:
    """Whether bytes read well as GBK, in which Chinese Windows saves text: mostly the common Chinese characters."""
    decode = codecs.getincrementaldecoder("gb18030")().decode  # The beginning may end within a letter.
    try:
        letters = ASCII.sub("", decode(text[:GBK_BYTES]))
    except UnicodeDecodeError:
        return False
    return len(letters) > 1 and len(COMMON_CHINESE.findall(letters)) > 0.8 * len(letters)


def up_to(items: Iterable[Item], size: int, size_of: Callable[[Item], int]) -> Iterator[Item]:
    """The first items, until they have this size together."""
    for item in items:
        yield item
        size -= size_of(item)
        if size <= 0:
            return


def batches(
    items: Iterable[Item], size: int, size_of: Callable[[Item], int], most: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Lists of neighbouring items, each until it has this size, or so many items; the last may have less."""
    remaining = iter(items)
    while batch := list(up_to(islice(remaining, most), size, size_of)):
        yield batch


def blocks(source: Source) -> Iterator[bytes]:
    """The bytes of a file, unpacked, in parts of 1 MiB."""
    with _open(source) as file:
        while block := file.read(TEXT_PART_BYTES):
            yield block
