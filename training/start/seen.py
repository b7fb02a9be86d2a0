"""Which rows does a run begin with, as the model sees them? Two of them, and what was cut or left out."""

from __future__ import annotations

from data.prepare.seen import Rows, columns_of_shards, lost_of_shards, passed_over, rows_of_shards, told
from training.start.startup import Start

SHOWN = 2


def begun_rows(begin: Start) -> Rows:
    """The first rows of a run's data, and what was cut or left out, for a table."""
    rows = rows_of_shards(begin.loader, begin.tokenizer, SHOWN)
    table = told(rows, columns_of_shards(begin.prepared))
    return [*table, *lost_of_shards(begin.config, begin.prepared), *passed_over(begin.config)]
