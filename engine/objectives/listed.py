"""What is minimised where answers come from a list: the cross-entropy among the tokens by which an answer of the list may go on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.blockwise import Objective
from model.decoding.answer_tree import DEAD, AnswerTree
from model.loss import IGNORED, LossSettings, Outside, loss_and_gradients, token_losses
from model.micro_batch import MicroBatch


class ListedObjective(Objective):
    """Learns which answer of a list it is, as answers are chosen; not how the answers of the list are written.

    A token that is certain has no loss, and no logits are computed for it. What is not in the list is compared with all tokens.
    """

    def __init__(self, tree: AnswerTree) -> None:
        self.tree = tree

    def loss_and_gradients(
        self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, scale: float, settings: LossSettings
    ) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        open_places, outside = self._choices(micro_batch, head)
        total, grad = loss_and_gradients(
            hidden[open_places], head, micro_batch.labels[open_places], scale, settings, head.grad, outside=outside
        )
        return total, torch.zeros_like(hidden).index_copy_(0, open_places, grad)

    def token_losses(self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, settings: LossSettings) -> Tensor:
        """See `Objective`."""
        open_places, outside = self._choices(micro_batch, head)
        losses = hidden.new_zeros(len(hidden), dtype=torch.float32)
        losses[open_places] = token_losses(
            hidden[open_places], head, micro_batch.labels[open_places], settings, outside
        )
        return losses

    def _choices(self, micro_batch: MicroBatch, head: Tensor) -> tuple[Tensor, Outside]:
        """The labels (k,) that are not certain, and what each of them is not compared with."""
        labels = micro_batch.labels.cpu().numpy()
        nodes = self.tree.nodes_before(labels, np.asarray(micro_batch.target.lengths))
        is_open = np.where(nodes == DEAD, labels != IGNORED, self.tree.degrees(nodes) > 1)
        nodes, device = nodes[is_open], head.device

        def outside(part: slice) -> Tensor:
            distinct, which = np.unique(nodes[part], return_inverse=True)
            closed = torch.from_numpy(self.tree.outside(distinct, head.shape[0])).to(device)
            return closed[torch.from_numpy(which).to(device)]

        return torch.from_numpy(np.flatnonzero(is_open)).to(device), outside
