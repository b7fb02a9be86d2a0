"""What is in a data file? Its columns, its first rows, and how long they are: `python -m data.sources.preview FILE` as JSON.

Run as a child by whoever must not import pyarrow. Lengths are in letters, as no tokenizer is chosen yet.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import islice
from typing import Any

from config import DataConfig
from data.sources.files import Source, find
from data.sources.layouts import Columns
from data.sources.lines import BadRows
from data.sources.reading import column_names, read_source, recognised_columns
from settings.errors import UserError

COUNTED_ROWS, SHOWN_ROWS, SHOWN_LETTERS = 2000, 8, 400
BARS = 24
CONVERSATIONS, PREFERENCES, PAIRS, TEXT = "conversations", "preferences", "pairs", "text"


def preview(spec: str) -> dict[str, Any]:
    """Describe a file by its first rows.

    Args:
        spec: as `--train_file`.
    Returns:
        `columns`, `task` (None where no column has a name that is known), `shown` columns, `rows` (the first ones), `counted` rows,
        `lengths` by column (median, longest, and bars of a histogram), `broken` rows.
    Raises:
        UserError: it cannot be read.
    Memory: the first `COUNTED_ROWS` rows.
    """
    source = find(spec)[0]
    columns = column_names(source)
    (task, known), bad = _task(source, columns), BadRows(skip=True)
    wanted = known or Columns(tuple(name for name in columns if _is_text(source, name)))
    batches = read_source(source, wanted, bad) if wanted.kinds(columns) else iter(())
    rows = list(islice((row for batch in batches for row in batch), COUNTED_ROWS))
    return {
        "file": str(source.path), "kind": source.kind, "columns": columns,
        "task": task, "shown": wanted.cells(),
        "rows": [[cell[:SHOWN_LETTERS] for cell in row] for row in rows[:SHOWN_ROWS]],
        "counted": len(rows), "is_whole": len(rows) < COUNTED_ROWS, "broken": bad.count,
        "lengths": {name: _lengths([len(row[place]) for row in rows]) for place, name in enumerate(wanted.cells())},
    }  # fmt: skip


def _task(source: Source, names: list[str]) -> tuple[str | None, Columns | None]:
    """What a file teaches, and the columns that say so."""
    data = DataConfig()
    pairs, preferences = (recognised_columns(data, kind, source) for kind in (PAIRS, PREFERENCES))
    if pairs is not None and pairs.texts == (data.prompt_column, data.response_column):
        return PAIRS, pairs
    if preferences is not None:
        return PREFERENCES, preferences
    if pairs is not None and not pairs.texts:
        return CONVERSATIONS, pairs
    if data.text_column in names:
        return TEXT, Columns((data.text_column,))
    return (None, None) if pairs is None else (PAIRS, pairs)


def _is_text(source: Source, column: str) -> bool:
    """Whether the first rows of a column can be read as text."""
    try:
        return any(islice(read_source(source, [column], BadRows(skip=True)), 1))
    except UserError:
        return False


def _lengths(lengths: list[int]) -> dict[str, Any]:
    if not lengths:
        return {"median": 0, "longest": 0, "bars": [], "bar": 1}
    ordered = sorted(lengths)
    most = ordered[min(len(ordered) - 1, int(0.98 * len(ordered)))]  # the few longest would press all others together
    bar = max(1, -(-most // BARS))
    bars = [0] * BARS
    for length in lengths:
        bars[min(BARS - 1, length // bar)] += 1
    return {"median": int(statistics.median(ordered)), "longest": ordered[-1], "bars": bars, "bar": bar}


def main(arguments: list[str]) -> int:
    """Print what `preview` finds, or the problems."""
    try:
        told: dict[str, Any] = preview(arguments[0])
    except UserError as error:
        told = {"problems": error.problems}
    print(json.dumps(told, ensure_ascii=False))
    return 2 if "problems" in told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
