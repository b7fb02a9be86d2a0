"""Text with some of it hidden: span corruption, UL2, prefix language modelling and denoising."""

from __future__ import annotations

from settings.declared import DataConfig
from tasks.base import Task


class Spans(Task):
    # From a file to a batch.

    # From a batch to a score.
    pass


class SpanCorruption(Spans):
    # From a batch to a score.

    def target_share(self, data: DataConfig) -> float:
        """The masked tokens, and a sentinel for each span of them."""
        return 1.3 * data.noise_density * (1 + 1 / data.mean_noise_span_length)
