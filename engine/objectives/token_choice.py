"""The loss of a token among a few tokens alone, as a reranker scores a document by "true" against "false".

Source: monoT5, Nogueira et al. 2020 (arXiv 2003.06713), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from devices.threads import one_thread
from engine.blockwise import Objective
from model.loss import LossSettings
from model.micro_batch import MicroBatch
from model.quantization import embed


class TokenChoice(Objective):
    """Measures how unlikely the first of some tokens is where only these may come; nothing is trained with it.

    Args:
        tokens: ids, two or more.
    Memory: that of the hidden states in fp32, once more.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def token_losses(self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, settings: LossSettings) -> Tensor:
        """See `Objective`; the labels are not read."""
        weight = embed(self.tokens.to(hidden.device), head, torch.float32)
        with one_thread():
            logits = F.linear(hidden.float(), weight)
        return -torch.log_softmax(logits, 1)[:, 0]
