"""About how many rows do files hold? Told in a moment, from facts of a file or its first MiB, and not by reading it all."""

from __future__ import annotations

import json
from collections.abc import Sequence

from data.sources.files import JSON, PARQUET, TABLES, TEXT, Source
from data.sources.lines import TEXT_PART_BYTES, blocks
from data.sources.reading import column_names
from data.sources.tables import open_parquet

PACKED = 4  # times smaller than what it holds, a packed text file
ROW_BYTES = 1024  # of an Arrow file, where nothing tells better
TOKEN_BYTES = 4  # of text in UTF-8, English as Chinese, with a vocabulary of some ten thousand tokens


def about_rows(sources: Sequence[Source]) -> int:
    """Rows of all files, at least one.

    Raises:
        UserError: a file cannot be read.
    """
    return max(1, sum(map(_rows, sources)))


def about_tokens(sources: Sequence[Source]) -> int:
    """Tokens of the texts of all files, if they hold little else, at least one."""
    return max(1, sum(_bytes(source) for source in sources) // TOKEN_BYTES)


def _bytes(source: Source) -> int:
    return int(source.path.stat().st_size) * (PACKED if source.compression or source.kind == PARQUET else 1)


def _rows(source: Source) -> int:
    if source.kind == PARQUET:
        with open_parquet(source.path) as file:
            return int(file.metadata.num_rows)
    if source.kind in TABLES:
        return _bytes(source) // ROW_BYTES
    begin = next(iter(blocks(source)), b"")
    mark = b"\n"
    if source.kind == JSON:
        mark = json.dumps(column_names(source)[0], ensure_ascii=False).encode("utf8", "replace") + b":"
    elif source.kind == TEXT and b"\n\n" in begin:
        mark = b"\n\n"
    found = max(1, begin.count(mark))
    return found if len(begin) < TEXT_PART_BYTES else found * _bytes(source) // len(begin)
