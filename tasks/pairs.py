"""A prompt and its response, which may come as a conversation or with several right answers."""

from __future__ import annotations

from typing import ClassVar

from tasks.base import Task


class Pairs(Task):
    # From a file to a batch.

    # From a batch to a score.

    answered_rows: ClassVar[int] = 256
