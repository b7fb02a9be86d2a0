"""Text with some of it hidden: span corruption, UL2, prefix language modelling and denoising."""

from __future__ import annotations

from tasks.base import Task


class Spans(Task):
    # From a file to a batch.

    # From a batch to a score.
    pass
