"""Where did the first number that is not finite come from? Every block is looked at, forward and backward.

Hooks look at what enters and leaves a block, at the gradient of its entry, and at the gradients of its weights as they
are handed over. The walk goes from block to block, so the first one found names the place. Each look waits for the device:
this is for finding a fault, not for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from engine.finite import OnReady, StepChecks
from engine.sharing.sharding import Shards
from model.t5 import T5


class Anomalies(StepChecks):
    """Watches the blocks of one model while it lives.

    Args:
        model: gets the hooks. shards: as of `StepChecks`.
    """

    def __init__(self, model: T5, shards: Shards | None = None) -> None:
        super().__init__(shards)
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        for word, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
            count = len(stack.blocks)
            for number, block in enumerate(stack.blocks, 1):
                block.register_forward_hook(partial(self._after_forward, f"{word} block {number} of {count}"))
            stack.final_norm.register_forward_hook(partial(self._after_forward, f"the last norm of the {word}"))

    def watching(self, on_ready: OnReady) -> OnReady:
        """The same callback of the walk, after a look at the gradients that are handed over."""

        def ready(weights: Sequence[nn.Parameter]) -> None:
            for weight in weights:
                if weight.grad is not None:
                    self._look(weight.grad, f"the gradient of {self._names[id(weight)]}")
            on_ready(weights)

        return ready

    def loss(self, loss: Tensor) -> None:
        """See `StepChecks`; after the last norm of the decoder."""
        self._look(loss, "the loss")
        super().loss(loss)

    def _look(self, tensor: Tensor, place: str) -> None:
        if self.first is None and not torch.isfinite(tensor).all():
            self.first = place

    def _after_forward(self, place: str, module: nn.Module, entered: tuple[Tensor, ...], left: Tensor) -> None:
        x = entered[0]
        self._look(x, f"what enters {place}")
        self._look(left, f"{place}, forward")
        if torch.is_grad_enabled() and x.requires_grad:
            x.register_hook(lambda grad: self._look(grad, f"{place}, backward"))
