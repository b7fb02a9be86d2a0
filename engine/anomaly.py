"""Names the first number that is not finite: every block is looked at, forward and backward.

Hooks look at what enters and leaves a block, and at the gradient of its entry. A pass goes from block to block, so the first one
found names the place. Each look waits for the device: this is for finding a fault, not for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from model.t5 import T5


class Anomalies:
    """Watches the blocks of one model, which gets the hooks, while it lives."""

    def __init__(self, model: T5) -> None:
        self.first: str | None = None  # where the first number that is not finite in this step came from, in words
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        for word, stack in model.stacks.items():
            count = len(stack.blocks)
            for number, block in enumerate(stack.blocks, 1):
                block.register_forward_hook(partial(self._after_forward, f"{word} block {number} of {count}"))
            stack.final_norm.register_forward_hook(partial(self._after_forward, f"the last norm of the {word}"))

    def look(self, tensor: Tensor, source: str) -> None:
        """Remember a source whose numbers are not finite, if it is the first."""
        if self.first is None and not torch.isfinite(tensor).all():
            self.first = source

    def look_at_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        for weight in weights:
            if weight.grad is not None:
                self.look(weight.grad, f"the gradient of {self._names[id(weight)]}")

    def _after_forward(self, source: str, module: nn.Module, entered: tuple[Tensor, ...], left: Tensor) -> None:
        x = entered[0]
        self.look(x, f"what enters {source}")
        self.look(left, f"{source}, forward")
        if torch.is_grad_enabled() and x.requires_grad:
            x.register_hook(lambda grad: self.look(grad, f"{source}, backward"))
