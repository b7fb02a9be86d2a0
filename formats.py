"""File endings that hold rows, and the format that each means; `data/sources/reading.py` has the reader of each."""

from __future__ import annotations

PARQUET, ARROW_FILE, ARROW_STREAM = "parquet", "arrow file", "arrow stream"
JSONL, JSON, CSV, TSV, TEXT, FASTA = "jsonl", "json", "csv", "tsv", "text", "fasta"
KIND_BY_SUFFIX = {
    ".parquet": PARQUET, ".arrow": ARROW_FILE, ".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL,
    ".csv": CSV, ".tsv": TSV, ".txt": TEXT, ".text": TEXT, ".md": TEXT,
    ".fasta": FASTA, ".fa": FASTA, ".faa": FASTA,
}  # fmt: skip
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
# of Parquet, which may encrypt a whole file or some columns
ENCRYPTED = "is encrypted; write it again without encryption"
