"""What is minimised with a head over labels: the loss of each row or token, from the hidden states of the last
stack.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from devices.threads import one_thread
from engine.blockwise import Objective
from model.label_head import LabelHead, label_loss
from model.loss import LossSettings
from model.micro_batch import MicroBatch
from model.t5 import T5


class LabelObjective(Objective):
    """Learns labels.

    Args:
        head: of the model. class_weights: factor on the loss of each class; None: 1. dropout_rate: of the head in
            training.
    Memory: the head's activations of one micro-batch; a few copies of its hidden states for a token head.
    """

    def __init__(
        self, head: LabelHead, class_weights: tuple[float, ...] | None = None, dropout_rate: float = 0.0
    ) -> None:
        self.head = head
        self.dropout_rate = dropout_rate
        self.logits: Tensor | None = None  # They are of the micro-batch that was evaluated last, until `clear`.
        self.class_weights: Tensor | None = None
        if class_weights is not None:
            self.class_weights = torch.tensor(class_weights, device=head.out.weight.device)

    def tables(self, model: T5) -> list[nn.Parameter]:
        """See `Objective`; none, as the outputs are labels."""
        return []

    def loss_and_gradients(
        self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, scale: float, settings: LossSettings
    ) -> tuple[Tensor, Tensor]:
        """See `Objective`; `head` is not read, and the gradients of the label head's weights are added to theirs."""
        with torch.enable_grad(), one_thread():
            leaf = hidden.detach().requires_grad_()
            logits = self.head(leaf, micro_batch.label_rows, self.dropout_rate)
            total = label_loss(logits, micro_batch.labels, self.class_weights, settings.label_smoothing)
            (total * scale).backward()
        assert leaf.grad is not None
        return total.detach(), leaf.grad

    def token_losses(self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, settings: LossSettings) -> Tensor:
        """See `Objective`; one sum of the whole micro-batch (1,)."""
        with one_thread():
            self.logits = self.head(hidden, micro_batch.label_rows)
        return label_loss(self.logits, micro_batch.labels, self.class_weights).reshape(1)

    def clear(self) -> None:
        """See `Objective`; lets go of what was predicted."""
        self.logits = None
