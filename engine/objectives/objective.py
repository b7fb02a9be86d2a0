"""A step's loss, given what the decoder hands to the head: the interface, and cross-entropy.

A pass knows nothing of losses but this: before it starts, the objective may complete the micro-batches; after the
decoder, it turns hidden states into a loss and their gradient; in evaluation, token losses into a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.micro_batches import MicroBatch
from model.loss import LossSettings, loss_and_gradients

# a forward without gradients or dropout: the loss of each token (N',), fp32, of each micro-batch
TokenLosses = Callable[[Sequence[MicroBatch]], Sequence[Tensor]]


class Objective:
    """The cross-entropy of each label token: pretraining and finetuning. Others override what differs."""

    def complete(self, micro_batches: Sequence[MicroBatch], token_losses: TokenLosses) -> Sequence[MicroBatch]:
        """Give the micro-batches with all that the loss needs; called before the pass holds anything."""
        return micro_batches

    def loss_and_gradients(
        self,
        hidden: Tensor,
        head: Tensor,
        micro_batch: MicroBatch,
        scale: float,
        settings: LossSettings,
        grad_head: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of a micro-batch, and the gradient of its hidden states times `scale`.

        Args and returns as of `model.loss.loss_and_gradients`.
        """
        return loss_and_gradients(hidden, head, micro_batch.labels, scale, settings, grad_head)

    def loss(self, losses: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch from its token losses (N',): evaluation."""
        return losses.sum()

    def clear(self) -> None:
        """Begin to count metrics anew."""

    @property
    def metrics(self) -> dict[str, float]:
        """Further figures since `clear`, each a sum over what the loss is averaged over; the same names on all ranks."""
        return {}
