"""The table of formats that hold rows. A new one is a line here, and a file with the reader that the line names."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """What is known of a format before a file is opened.

    Args:
        reader: the subclass of `data.sources.reader.Reader`, `file:Class` in `data/sources/`.
        endings: of the names of its files.
        counts_lines: whether a message names the line on which a record begins, rather than its number.
    """

    reader: str
    endings: tuple[str, ...] = ()
    counts_lines: bool = False


PARQUET = "parquet"
ARROW_FILE = "arrow file"
ARROW_STREAM = "arrow stream"
JSONL = "jsonl"
JSON = "json"
CSV = "csv"
TSV = "tsv"
TEXT = "text"
FASTA = "fasta"
FORMATS = {
    PARQUET: Format("tables:Parquet", (".parquet",)),
    ARROW_FILE: Format("tables:Arrow", (".arrow",)),
    ARROW_STREAM: Format("tables:Arrow"),
    JSONL: Format("json_rows:JsonLines", (".jsonl", ".ndjson", ".json"), counts_lines=True),
    JSON: Format("json_rows:JsonArray"),
    CSV: Format("csv_rows:Csv", (".csv",), counts_lines=True),
    TSV: Format("csv_rows:Tsv", (".tsv",), counts_lines=True),
    TEXT: Format("plain_text:PlainText", (".txt", ".text", ".md"), counts_lines=True),
    FASTA: Format("fasta:Fasta", (".fasta", ".fa", ".faa"), counts_lines=True),
}
KIND_BY_SUFFIX = {ending: kind for kind, format in FORMATS.items() for ending in format.endings}
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
# Parquet may encrypt a whole file, or some columns.
ENCRYPTED = "is encrypted; write it again without encryption"
