"""One file of rows: where it is, and what it is by its first bytes where these tell, else by its ending."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TypeVar

from data.sources.formats import (
    ARROW_FILE,
    ARROW_STREAM,
    COMPRESSED_SUFFIXES,
    ENCRYPTED,
    JSON,
    JSONL,
    KIND_BY_SUFFIX,
    PARQUET,
    TEXT,
)
from data.sources.places import Place, readable
from settings.errors import UserError
from support.language import say

TABLES = (PARQUET, ARROW_FILE, ARROW_STREAM)
FIRST_BYTES = 512  # of a file, which tell what it is
KIND_BY_MAGIC = {b"PAR1": PARQUET, b"ARROW1": ARROW_FILE, b"\xff\xff\xff\xff": ARROW_STREAM}
COMPRESSION_BY_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    **dict.fromkeys((b"BZh%d1AY&SY" % level for level in range(1, 10)), "bzip2"),
    # A frame to skip comes first where pzstd notes sizes.
    **{bytes([number, 0x2A, 0x4D, 0x18]): "zstd" for number in range(0x50, 0x60)},
}
HTML = (
    "is an HTML page, not {kind}: probably a saved sign-in or preview page; download the raw file (on the Hugging "
    "Face hub, use /resolve/ in the address, not /blob/)"
)
GIT_LFS = "is a git-lfs pointer instead of the file itself; run `git lfs pull` in the clone, or download the file"
UTF16 = "is UTF-16; save it as UTF-8"
ARCHIVE = "is an archive; unpack it"
# How other things begin, in small letters, that a failed download leaves under a data file's name.
STRANGERS = {
    b"version https://git-lfs": GIT_LFS,
    b"<!doctype html": HTML,
    b"<html": HTML,
    b"\xff\xfe": UTF16,
    b"\xfe\xff": UTF16,
    b"pk\x03\x04": "is a zip archive (as are Excel and Word files); unpack it, or save the sheet as CSV",
    b"rar!\x1a": ARCHIVE,
    b"7z\xbc\xaf": ARCHIVE,
    b"%pdf-": "is a PDF; save its text as UTF-8",
    b"sqlite format 3\0": "is a database; export its rows to JSONL, CSV or Parquet",
}
NO_STRANGERS = {TEXT: HTML}  # A page may be text.
TAR = b"ustar"
TAR_BEGIN = 257
TAR_SUFFIXES = (".tar", ".tgz")
MOST_NULS = 1 / 16  # of the bytes of a text; in UTF-16 each second one is NUL, and in other files many are
Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Source:
    """One file of rows.

    Args:
        path: where it is. kind: its format, a key of `formats.FORMATS`. compression: gzip, bzip2, xz, zstd or None.
        part: which of the parts separated by commas it comes from, counted from 0.
    """

    path: Place
    kind: str
    compression: str | None = None
    part: int = 0


def detect(path: Place, name: str, part: int = 0) -> Source:
    """What is in a file.

    Args:
        name: of the setting, for messages. part: of which it is.
    Raises:
        UserError: it cannot be read, is empty, or no data.
    """
    # A pipe or a device has no end, or cannot be read twice.
    if isinstance(path, Path) and not path.is_file():
        raise UserError(
            "{name} = {path}, is not an ordinary file; write its content to a file, and give that", name=name, path=path
        )
    with readable(f"{name} = {path}", is_far=not isinstance(path, Path)), path.open("rb") as file:
        start = file.read(FIRST_BYTES)
    kind = KIND_BY_SUFFIX.get(data_suffix(path), TEXT)
    compression = _by_magic(COMPRESSION_BY_MAGIC, start)
    if compression is None:
        kind = _by_magic(KIND_BY_MAGIC, start) or kind
        if kind == JSONL and _text_of(start).startswith(b"["):
            kind = JSON
    source = Source(path, kind, compression, part)
    problem = _problem(source, start)
    if problem:
        raise UserError("{name} = {value}, {problem}", name=name, value=path, problem=problem)
    return source


def data_suffix(path: Place | PurePath) -> str:
    """The ending of a data file, without that of its compression; empty where it has none."""
    endings = [suffix.lower() for suffix in path.suffixes]
    return next((ending for ending in reversed(endings) if ending not in COMPRESSED_SUFFIXES), "")


def _problem(source: Source, start: bytes) -> str:
    """What is wrong with a file that begins so; empty where nothing is."""
    if not start:
        return say("is empty; give a file with rows")
    if data_suffix(source.path) in TAR_SUFFIXES or start[TAR_BEGIN:].startswith(TAR):
        return say(ARCHIVE)
    stranger = _by_magic(STRANGERS, _text_of(start))
    if stranger not in (None, NO_STRANGERS.get(source.kind)):
        return say(str(stranger), kind=source.kind)
    if source.kind in TABLES and _by_magic(KIND_BY_MAGIC, start) is None:
        return _no_table(source, start)
    if (source.kind, source.compression) == (TEXT, None) and start.count(b"\0") > MOST_NULS * len(start):
        return say("holds many NUL bytes and is not UTF-8 text")
    return ""


def _no_table(source: Source, start: bytes) -> str:
    """What is wrong with a file that is called a table, and begins otherwise."""
    if source.compression is not None:
        packed = "is packed with {compression}; unpack it first, {kind} packs by itself"
        return say(packed, compression=source.compression, kind=source.kind)
    if start.startswith(b"PARE"):
        return say(ENCRYPTED)
    return say("does not begin like {kind}; it is another format or broken, write it again", kind=source.kind)


def _text_of(start: bytes) -> bytes:
    return start.removeprefix(codecs.BOM_UTF8).lstrip().lower()


def _by_magic(table: Mapping[bytes, Fact], start: bytes) -> Fact | None:
    return next((fact for magic, fact in table.items() if start.startswith(magic)), None)
