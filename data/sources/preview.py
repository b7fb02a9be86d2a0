"""What is in a data file? Its columns, its first rows, and how long they are: `python -m data.sources.preview FILE` as JSON.

Run as a child by whoever must not import pyarrow. Lengths are in letters, as no tokenizer is chosen yet.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import islice
from typing import Any

from data.sources.files import Source, find
from data.sources.lines import BadRows
from data.sources.reading import column_names, read_source, recognised_columns
from data.text.conversations import MESSAGES_COLUMNS, TurnsColumn
from settings.fields import UserError

COUNTED_ROWS, SHOWN_ROWS, SHOWN_LETTERS = 2000, 8, 400
BARS = 24
CONVERSATIONS = "conversations"
# what a file teaches -> the columns that say so
TASKS = {
    "preferences": ("prompt", "chosen", "rejected"),
    "pairs": ("prompt", "response"),
    "text": ("text",),
}


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
    task, bad = _task(set(columns)), BadRows(skip=True)
    known = recognised_columns(source) if task is None else None
    task = "pairs" if known else task
    wanted = list(known or _wanted(task, columns)) or [name for name in columns if _is_text(source, name)]
    batches = read_source(source, wanted, bad) if wanted else iter(())
    rows = list(islice((row for batch in batches for row in batch), COUNTED_ROWS))
    return {
        "file": str(source.path), "kind": source.kind, "columns": columns,
        "task": task, "shown": wanted,
        "rows": [[cell[:SHOWN_LETTERS] for cell in row] for row in rows[:SHOWN_ROWS]],
        "counted": len(rows), "is_whole": len(rows) < COUNTED_ROWS, "broken": bad.count,
        "lengths": {name: _lengths([len(row[place]) for row in rows]) for place, name in enumerate(wanted)},
    }  # fmt: skip


def _task(names: set[str]) -> str | None:
    if names & set(MESSAGES_COLUMNS) and not set(TASKS["pairs"]) <= names:
        return CONVERSATIONS
    return next((task for task, needed in TASKS.items() if set(needed) <= names), None)


def _wanted(task: str | None, columns: list[str]) -> list[str]:
    """The columns that a task reads."""
    if task == CONVERSATIONS:
        return [TurnsColumn(next(name for name in MESSAGES_COLUMNS if name in columns))]
    return list(TASKS[task]) if task else []


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
