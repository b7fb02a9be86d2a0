"""A prompt and its response, which may come as a conversation or with several right answers."""

from __future__ import annotations

from tasks.base import Task


class Pairs(Task):
    # From a file to a batch.

    # From a batch to a score.
    pass
