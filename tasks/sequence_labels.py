"""A text with one label or number: classification and regression."""

from __future__ import annotations

from tasks.base import Task


class SequenceLabels(Task):
    # From a file to a batch.

    # From a batch to a score.
    pass
