"""When are weights updated: each block as soon as its gradients are complete, or all together behind the walk?

At once is the rule: the gradients of one block are all that is ever held. Clipping the global norm and scaling the loss
need all gradients, so they keep them, and the plan prices them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from engine.optimizers import Optimizer, Step
from engine.scaling import LossScaling


class Update:
    """Applies gradients.

    Args:
        optimizer: holds state and rule.
        max_grad_norm: clip all gradients to this global norm; 0: off.
        scaling: the scale that the walk puts on the loss; None: gradients are not scaled.
    Without both, each block is updated inside the walk.
    """

    def __init__(self, optimizer: Optimizer, max_grad_norm: float = 0.0, scaling: LossScaling | None = None) -> None:
        self.optimizer, self.max_grad_norm, self.scaling = optimizer, max_grad_norm, scaling
        self.step = Step(1, 0.0)
        self.has_begun = False  # whether any weight was changed in this step: then it cannot be run again
        self.is_skipped = False  # whether the last step was left out because a gradient was not finite
        self._held: list[nn.Parameter] = []

    @property
    def holds_all(self) -> bool:
        """Whether all gradients are held until the walk has ended."""
        return self.max_grad_norm > 0 or self.scaling is not None

    def begin(self, step: Step) -> None:
        """Tell the step before its first walk."""
        skipped = 0 if self.scaling is None else self.scaling.skipped_steps
        self.step = replace(step, number=step.number - skipped)
        self._held, self.has_begun, self.is_skipped = [], False, False

    def ready(self, weights: Sequence[nn.Parameter]) -> None:
        """Take weights whose gradients are final."""
        if self.holds_all:
            self._held += weights
        else:
            self._apply(weights)

    def finish(self) -> None:
        """Behind the walk: unscale, clip and apply what was held; or leave the step out."""
        held, self._held = [weight for weight in self._held if weight.grad is not None], []
        if held:
            scale = 1.0 if self.scaling is None else self.scaling.scale
            gradients = [weight.grad for weight in held if weight.grad is not None]
            self.is_skipped = self.scaling is not None and not self.scaling.admits(gradients)
            del gradients
            if self.is_skipped:
                for weight in held:
                    weight.grad = None
                return
            factor = 1.0 / scale
            if self.max_grad_norm:
                factor *= self.max_grad_norm / max(global_norm(held) / scale, self.max_grad_norm)
            self._apply(held, factor)

    def _apply(self, weights: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        for weight in weights:
            self.has_begun = True
            if weight.grad is not None and factor != 1.0:
                _multiply(weight, factor)
            self.optimizer.update(weight, self.step)
            weight.grad = None


def _multiply(weight: nn.Parameter, factor: float) -> None:
    """Multiply a gradient; in fp32 where the weight is fp32 and its gradient is not, where small results would vanish."""
    assert weight.grad is not None
    if weight.grad.dtype == torch.float16:
        assert weight.dtype == torch.float32, "fp16 is the dtype of products, never of weights at rest"
        weight.grad = weight.grad.float()
    weight.grad.mul_(factor)


def global_norm(weights: Sequence[nn.Parameter]) -> float:
    """L2 norm over the gradients of all weights."""
    norms = [torch.linalg.vector_norm(w.grad, dtype=torch.float32) for w in weights if w.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
