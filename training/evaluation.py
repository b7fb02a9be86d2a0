"""How good is the model? Loss over held-out rows, streaming: nothing grows with the number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from data.collate import Batch
from engine.slices import to_slice
from engine.walk import Walk


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per label token over `rows` rows of all processes."""

    loss: float
    tokens: int
    rows: int

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(walk: Walk, batches: Iterable[Batch], accelerator: Accelerator, device: torch.device) -> Evaluation:
    """Run the batches forward, without dropout, and average over all processes.

    Args:
        batches: this process's share.
    Memory: one micro-batch of evaluation.
    """
    sums = torch.zeros(3, dtype=torch.float64)  # loss, labels, rows
    for batch in batches:
        part = to_slice(batch, walk.model.config.pad_token_id, device)
        sums += torch.tensor([float(walk.loss([part])), part.num_labels, batch.num_rows], dtype=torch.float64)
    if accelerator.num_processes > 1:
        sums = accelerator.reduce(sums.float().to(device), reduction="sum").double().cpu()
    loss, tokens, rows = sums.tolist()
    return Evaluation(loss / max(tokens, 1.0), int(tokens), int(rows))
