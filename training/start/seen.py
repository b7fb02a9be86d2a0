"""Which rows does a run begin with, as the model sees them? Two of them, and the share that was cut."""

from __future__ import annotations

from data.prepare.seen import Rows, columns_of_shards, cut_of_shards, passed_over, rows_of_shards, told
from language import say
from training.start.startup import Start

SHOWN = 2


def begun_rows(begin: Start) -> Rows:
    """The first rows of a run's data, and how many were cut, for a table."""
    cut = cut_of_shards(begin.config, begin.prepared)
    rows = rows_of_shards(begin.loader, begin.tokenizer, SHOWN)
    table = told(rows, columns_of_shards(begin.prepared))
    return [*table, *([(say("cut"), cut)] if cut else []), *passed_over(begin.config)]
