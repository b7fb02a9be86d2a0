"""Where are a block's weights, and as what, while it is not visited?

The walk brings a block's weights before its visit and lets them go after it. The simplest residency leaves them where
they are. `CastOnVisit` stores them small (bf16) and computes with a wider copy (fp32) that lives as long as the visit:
on a chip without bf16 units that is the memory of bf16 at the speed of fp32. Weights on disk or on other ranks fit the
same seam. What changes is `weight.data`; graphs kept from forward see the copy that is brought again for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Residency:
    """Weights stay where they are and are used as they are stored."""

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype

    @contextmanager
    def visit(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        """Have `weights` ready to compute with until the context ends."""
        yield


class CastOnVisit(Residency):
    """Weights are stored in one dtype and computed in another. Memory: one block's weights in the compute dtype."""

    @contextmanager
    def visit(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        stored = [(w, w.data) for w in weights if w.dtype != self.compute_dtype and w.dtype != torch.float32]
        for weight, data in stored:
            weight.data = data.to(self.compute_dtype)
        try:
            yield
        finally:
            for weight, data in stored:
                weight.data = data


def residency_for(storage_dtype: torch.dtype, compute_dtype: torch.dtype) -> Residency:
    """The residency that these dtypes need."""
    return (Residency if storage_dtype == compute_dtype else CastOnVisit)(compute_dtype)
