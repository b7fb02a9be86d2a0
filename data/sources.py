"""Which files does the user mean, what is in them, and have they changed?

A source is one local file: plain text, JSONL, CSV or TSV (each plain or compressed with gzip, xz or zstandard),
Parquet, or Arrow IPC as file or as stream (Hugging Face's `.arrow`). What a file is follows from its first bytes where
these tell, else from its ending. `reading` turns sources into rows.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data.cache import fingerprint
from settings import UserError

PARQUET, ARROW_FILE, ARROW_STREAM, JSONL, CSV, TSV, TEXT = (
    "parquet",
    "arrow file",
    "arrow stream",
    "jsonl",
    "csv",
    "tsv",
    "text",
)
KIND_BY_SUFFIX = {
    ".parquet": PARQUET, ".arrow": ARROW_FILE, ".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL,
    ".csv": CSV, ".tsv": TSV, ".txt": TEXT, ".text": TEXT, ".md": TEXT,
}  # fmt: skip
KINDS_OF_FOLDERS = tuple(suffix for suffix in KIND_BY_SUFFIX if suffix not in (".json", ".md"))
COMPRESSION_BY_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
TABLES = (PARQUET, ARROW_FILE, ARROW_STREAM)


@dataclass(frozen=True)
class Source:
    """One file of rows.

    Args:
        path: where it is; kind: one of the seven above; compression: gzip, xz, zstd or None.
    """

    path: Path
    kind: str
    compression: str | None = None


def find(spec: str, name: str = "--train_file") -> list[Source]:
    """Find the files that a user means.

    Args:
        spec: a file, a folder (all data files below it, in the order of their names), a glob, or several parted by
        commas. name: what messages call it.
    Returns:
        one or more sources, without repetition.
    Raises:
        UserError: all problems at once.
    """
    problems: list[str] = []
    paths: dict[Path, None] = {}
    for part in _parts(spec):
        found = _paths(part)
        if not found:
            problems.append(_nothing_found(part, name))
        paths.update(dict.fromkeys(found))
    sources = []
    for path in paths:
        try:
            sources.append(_detect(path, name))
        except UserError as error:
            problems += error.problems
    if problems or not sources:
        raise UserError(*(problems or [f"{name} = {spec}, names no file"]))
    return sources


def _parts(spec: str) -> list[str]:
    """Part at commas, except where the whole is the name of a file."""
    whole = spec.strip()
    return [whole] if Path(whole).exists() else [part.strip() for part in whole.split(",") if part.strip()]


def _paths(part: str) -> list[Path]:
    path = Path(part).expanduser()
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and _belongs_to_folder(file.relative_to(path)))
    if path.exists():
        return [path]
    return [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]


def _belongs_to_folder(path: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in path.parts) and _data_suffix(path) in KINDS_OF_FOLDERS


def _data_suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _nothing_found(part: str, name: str) -> str:
    if "://" in part:
        return f"{name} = {part}, is an address; only local files are read, download it first"
    if Path(part).is_dir():
        return f"{name} = {part}, holds no data file; known endings: {', '.join(KINDS_OF_FOLDERS)}"
    return f"{name} = {part}, no such file; name a file, a folder or a glob"


def _detect(path: Path, name: str) -> Source:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise UserError(f"{name} = {path}, cannot be read: {error.strerror or error}") from None
    if not start:
        raise UserError(f"{name} = {path}, is empty; name a file with rows")
    kind = KIND_BY_SUFFIX.get(_data_suffix(path), TEXT)
    compression = next((how for magic, how in COMPRESSION_BY_MAGIC.items() if start.startswith(magic)), None)
    if compression:
        if kind in TABLES:
            raise UserError(f"{name} = {path}, is packed with {compression}; unpack it first, {kind} packs by itself")
        return Source(path, kind, compression)
    if start.startswith(b"PAR1"):
        return Source(path, PARQUET)
    if start.startswith(b"ARROW1"):
        return Source(path, ARROW_FILE)
    if start.startswith(b"\xff\xff\xff\xff") and len(start) == 8:
        return Source(path, ARROW_STREAM)
    if kind in TABLES:
        raise UserError(f"{name} = {path}, does not begin like {kind}; it is another format or broken, write it anew")
    return Source(path, kind)


def sources_fingerprint(sources: Iterable[Source]) -> str:
    """Hash names, sizes and times of change: another value means that the data may have changed."""
    facts = []
    for source in sources:
        state = source.path.stat()
        facts.append([str(source.path.resolve()), source.kind, state.st_size, state.st_mtime_ns])
    return fingerprint(facts)
