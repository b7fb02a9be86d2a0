"""Which rows does a run begin with, as the model sees them? Two of them, and what was cut or left out."""

from __future__ import annotations

from data.prepare.seen import Rows, table_of_shards
from training.start.startup import Start

SHOWN = 2


def begun_rows(begin: Start) -> Rows:
    """The first rows of a run's data, and what was cut or left out, for a table."""
    return table_of_shards(begin.config, begin.prepared, begin.loader, begin.tokenizer, SHOWN)
