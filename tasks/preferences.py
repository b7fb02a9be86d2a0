"""A prompt with two responses, of which one is better: DPO, IPO and ORPO."""

from __future__ import annotations

from tasks.base import Task


class Preferences(Task):
    # From a file to a batch.

    # From a batch to a score.
    pass
