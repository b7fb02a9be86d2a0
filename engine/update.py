"""When are weights updated: each block as soon as its gradients are complete, or all together behind the walk?

At once is the rule: the gradients of one block are all that is ever held. Clipping the global norm needs all gradients,
so it keeps them, and the plan prices them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from engine.optimizers import Optimizer, Step


class Update:
    """Applies gradients.

    Args:
        optimizer: holds state and rule.
        max_grad_norm: clip all gradients to this global norm; 0: off, and each block is updated inside the walk.
    """

    def __init__(self, optimizer: Optimizer, max_grad_norm: float = 0.0) -> None:
        self.optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self.step = Step(1, 0.0)
        self.has_begun = False  # whether any weight was changed in this step: then it cannot be run again
        self._held: list[nn.Parameter] = []

    def begin(self, step: Step) -> None:
        """Tell the step before its first walk."""
        self.step, self._held, self.has_begun = step, [], False

    def ready(self, weights: Sequence[nn.Parameter]) -> None:
        """Take weights whose gradients are final."""
        if self.max_grad_norm:
            self._held += weights
        else:
            self._apply(weights)

    def finish(self) -> None:
        """Behind the walk: clip and apply what was held."""
        if self.max_grad_norm and self._held:
            norm = global_norm(self._held)
            factor = self.max_grad_norm / max(norm, self.max_grad_norm)
            for weight in self._held:
                if weight.grad is not None:
                    weight.grad.mul_(factor)
        self._apply(self._held)
        self._held = []

    def _apply(self, weights: Sequence[nn.Parameter]) -> None:
        for weight in weights:
            self.has_begun = True
            self.optimizer.update(weight, self.step)
            weight.grad = None


def global_norm(weights: Sequence[nn.Parameter]) -> float:
    """L2 norm over the gradients of all weights."""
    norms = [torch.linalg.vector_norm(w.grad, dtype=torch.float32) for w in weights if w.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
