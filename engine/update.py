"""When are weights updated: each block as soon as its gradients are complete, or all together after the walk?

At once is the rule: the gradients of one block are all that is ever held. Clipping the global norm and scaling the loss
need all gradients, so they keep them, and the plan prices them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from devices.base import is_host
from engine.finite import is_finite, norm_of
from engine.optimizers import Optimizer, Step
from engine.scaling import LossScaling
from engine.weights import WeightStore


class Update:
    """Applies gradients.

    Args:
        optimizer: holds state and rule.
        max_grad_norm: clip all gradients to this global norm; 0: off.
        scaling: the scale that the walk puts on the loss; None: gradients are not scaled.
        weight_store: where weights rest; None: in memory.
    Without both, each block is updated inside the walk.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_grad_norm: float = 0.0,
        scaling: LossScaling | None = None,
        weight_store: WeightStore | None = None,
    ) -> None:
        self.weight_store = weight_store or WeightStore(torch.float32)
        self.optimizer, self.max_grad_norm, self.scaling = optimizer, max_grad_norm, scaling
        self.step = Step(1, 0.0)
        self.has_begun = False  # whether any weight was changed in this step: then it cannot be run again
        self.is_skipped = False  # whether the last step was left out because a gradient was not finite
        self.is_finite = True  # whether all gradients of the last step were; if not, `has_begun` tells what is lost
        self.seconds = 0.0  # that the last step's updates took on the host, without waiting for weights
        self.unseen_norm: Tensor | None = None  # of the last step's gradients, on a GPU: nobody has waited for it
        self._scale_before: LossScaling | None = None  # as the step began
        self._held: list[nn.Parameter] = []
        self._vectors: list[nn.Parameter] = []  # on a GPU, until the walk has ended
        self._norms: list[Tensor] = []  # of each block's gradients; on the device until the walk has ended

    @property
    def holds_all(self) -> bool:
        """Whether all gradients are held until the walk has ended."""
        return self.max_grad_norm > 0 or self.scaling is not None

    def begin(self, step: Step) -> None:
        """Tell the step before its first walk."""
        skipped = 0 if self.scaling is None else self.scaling.skipped_steps
        self.step = replace(step, number=step.number - skipped)
        self._scale_before = None if self.scaling is None else replace(self.scaling)
        self._vectors = []
        self.seconds = 0.0
        self._held, self._norms, self.has_begun, self.is_skipped, self.is_finite = [], [], False, False, True

    def ready(self, weights: Sequence[nn.Parameter]) -> None:
        """Take weights whose gradients are final."""
        if self.holds_all:
            self._held += weights
        else:
            gradients = _gradients(weights)
            if gradients:
                self._norms.append(norm_of(gradients))
            self._apply([weight for weight in weights if not self._waits(weight)])

    def _waits(self, weight: nn.Parameter) -> bool:
        """Whether a weight is updated with all others of its kind: on a GPU vectors, so that few kernels serve all blocks."""
        waits = weight.dim() == 1 and weight.grad is not None and not is_host(weight)
        if waits:
            self._vectors.append(weight)
        return waits

    def held_norm(self) -> Tensor | None:
        """L2 norm of the gradients that are held, of a scaled loss; None where none is, or where looking costs nothing."""
        gradients = _gradients(self._held)
        return norm_of(gradients) if gradients and not is_host(gradients[0]) else None

    def finish(self, norm: float | None = None) -> None:
        """After the walk: unscale, clip and apply what was held; or leave the step out.

        Args:
            norm: `held_norm`, once it has been looked at.
        """
        vectors, self._vectors = self._vectors, []
        self._apply(vectors)
        held, self._held = [weight for weight in self._held if weight.grad is not None], []
        if not held:
            norms, self._norms = self._norms, []
            if norms and not is_host(norms[0]):  # looked at in the next step, with its loss
                self.unseen_norm = norm_of(norms)
            else:
                self.is_finite = is_finite(norms)
        elif self._admits(held, norm):
            scale = 1.0 if self.scaling is None else self.scaling.scale
            factor = 1.0 / scale
            if self.max_grad_norm:
                norm = global_norm(held) if norm is None else norm
                factor *= self.max_grad_norm / max(norm / scale, self.max_grad_norm)
            self._apply(held, factor)
        else:
            for weight in held:
                weight.grad = None

    def keep_scale(self) -> None:
        """A process that saw its loss has left the step out for all: no other's loss scale moves by it, as the first's did not."""
        if self.scaling is not None and self._scale_before is not None:
            for name, value in self._scale_before.as_dict().items():
                setattr(self.scaling, name, value)

    def _admits(self, held: Sequence[nn.Parameter], norm: float | None) -> bool:
        """Whether held gradients are finite; a loss scale that was too large takes the blame where there is one."""
        are_finite = is_finite(_gradients(held)) if norm is None else math.isfinite(norm)
        if self.scaling is None:
            self.is_finite = are_finite
        else:
            self.is_skipped = not self.scaling.admits(are_finite)
        return self.is_finite and not self.is_skipped

    def _apply(self, weights: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        is_changing = any(weight.grad is not None for weight in weights)  # frozen ones are handed over as well
        self.has_begun = self.has_begun or is_changing
        for part in self.weight_store.parted(weight for weight in weights if weight.grad is not None):
            with self.weight_store.held(part, is_changed=True):
                began = time.perf_counter()
                for group in self.optimizer.groups(part):
                    if factor != 1.0:
                        _multiply(group, factor)
                    self.optimizer.update(group, self.step)
                    for weight in group:
                        weight.grad = None
                self.seconds += time.perf_counter() - began


def _multiply(weights: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply gradients; in fp32 where the weight is fp32 and its gradient is not, where small results would vanish."""
    for weight in weights:
        assert weight.grad is not None
        if weight.grad.dtype == torch.float16:
            assert weight.dtype == torch.float32, "fp16 is the dtype of products, never of weights at rest"
            weight.grad = weight.grad.float()
    gradients = _gradients(weights)
    if len(gradients) > 1:
        torch._foreach_mul_(gradients, factor)
    else:
        gradients[0].mul_(factor)


def _gradients(weights: Sequence[nn.Parameter]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def global_norm(weights: Sequence[nn.Parameter]) -> float:
    """L2 norm over the gradients of all weights."""
    return float(norm_of(_gradients(weights)))
