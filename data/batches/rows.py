"""What rows are cut and masked by, before they become a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from settings.declared import DataConfig
from settings.tasks import task_named

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class SpecialIds:
    """The ids that tasks write: end of text, padding, and sentinels in the order of their use."""

    eos: int
    pad: int
    sentinels: tuple[int, ...]


@dataclass(frozen=True)
class Lengths:
    """Longest window, encoder input and decoder target of a task, in tokens with end of text."""

    raw_tokens: int
    input_tokens: int
    target_tokens: int


@dataclass(frozen=True)
class RowSettings:
    """How a stored row becomes a row of a batch.

    Args:
        lengths: to which rows are cut.
        noise_density: share of tokens that are masked.
        mean_noise_span: mean length of a masked span.
        decodes: whether the model has a decoder.
    """

    lengths: Lengths
    special: SpecialIds
    noise_density: float
    mean_noise_span: float
    decodes: bool

    def input(self, ids: NDArray[np.generic]) -> Ids:
        """Token ids of the encoder, cut."""
        return cut(ids.astype(np.int64), self.lengths.input_tokens, self.special.eos)

    def target(self, ids: NDArray[np.generic]) -> Ids:
        """Token ids of the decoder, cut."""
        return cut(ids.astype(np.int64), self.lengths.target_tokens, self.special.eos)


def cut(ids: Ids, longest: int, eos: int) -> Ids:
    """Ids cut to a length, with eos as their last token."""
    return ids if len(ids) <= longest else np.concatenate((ids[: longest - 1], [eos]))


def lengths_of(data: DataConfig, objective: str, num_sentinels: int = 100) -> Lengths:
    """How long windows, inputs and targets of an objective get; see `tasks.base.BaseTask.lengths`."""
    lengths: Lengths = task_named(objective).lengths(data, num_sentinels)
    return lengths
