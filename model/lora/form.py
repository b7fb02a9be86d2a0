"""Which form has an adapter, and where does it belong?"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LoraSettings:
    """The form of an adapter.

    Args:
        rank: r, at least 1. alpha: numerator of the scaling.
        targets: names of the matrices as Hugging Face has them: q, k, v, o, wi or wi_0 and wi_1, wo.
        dropout: share dropped of what the adapters read.
        rank_stabilised: alpha / sqrt(r) instead of alpha / r. dora: learn the rows' lengths too.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("q", "v")
    dropout: float = 0.0
    rank_stabilised: bool = False
    dora: bool = False

    @property
    def scaling(self) -> float:
        """s, the factor on B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@dataclass(frozen=True)
class AdapterInfo:
    """What a folder says of its adapter: form, the folder of its base, and the base's fingerprint ("" if unknown)."""

    settings: LoraSettings
    base: str
    fingerprint: str
