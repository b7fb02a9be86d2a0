"""A text with a label for each of its words or letters."""

from __future__ import annotations

from tasks.base import Task


class TokenLabels(Task):
    # From a file to a batch.

    # From a batch to a score.
    pass
