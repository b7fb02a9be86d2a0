"""The optimizer in backward: each block is updated as soon as its gradients are complete, and they are freed.

    apply(weights):   all-reduce over the processes -> norm -> update -> free the gradients
    finish(loss):     read loss and norm, the one wait for a GPU in a step -> update what was held until then

All gradients are held where clipping or a loss scale has to know their norm before any weight changes, and where the
plan finds that holding them costs no memory: while backward frees activations, gradients take their place. Elsewhere a
step whose gradients are not finite has spoiled weights by the time that anybody knows.

Norms are Euclidean: on a CPU those take a fortieth of the time of largest magnitudes, and where a norm leaves fp32 the
run is lost anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from devices.base import is_host, traits_of
from devices.kernels.calls import kernels_for
from engine.all_reduce import OneProcess, Reducer, Weights
from engine.loss_scaling import LossScaling
from engine.optimizers import Optimizer, Step
from engine.optimizers.base import row_chunks
from engine.weights import WeightStore


class OptimizerInBackward:
    """Applies the gradients of one model.

    Args:
        optimizer: holds state and rule.
        max_grad_norm: clip all gradients to this global norm; 0: off.
        scaling: the scale that the loss was multiplied with; None: none.
        weight_store: where weights are stored; None: in memory.
        reducer: sums gradients over the processes; None: there is one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_grad_norm: float = 0.0,
        scaling: LossScaling | None = None,
        weight_store: WeightStore | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.scaling = scaling
        self.weight_store = weight_store or WeightStore(torch.float32)
        self.reducer = reducer or OneProcess()
        # Clipping and a loss scale need the norm of all gradients before any weight changes.
        self.needs_norm = max_grad_norm > 0 or scaling is not None
        self.holds_gradients = self.needs_norm
        self.begin(Step(1, 0.0))

    def begin(self, step: Step) -> None:
        """A step begins. The optimizer does not count steps that have overflowed: its means never saw their
        gradients.
        """
        skipped_steps = 0 if self.scaling is None else self.scaling.skipped_steps
        self.step = replace(step, number=step.number - skipped_steps)
        self.has_changed_weights = False
        self.seconds = 0.0  # Time of the step's updates on the host, without waiting for weights.
        self._waited_before = self.weight_store.waited_seconds()
        self._waiting: list[nn.Parameter] = []  # Their gradients are final, and they are updated in `finish`.
        self._norms: list[Tensor] = []
        self.reducer.begin()

    def apply(self, weights: Weights) -> None:
        """Take weights whose gradients this process has completed, and update those whose gradients are final.

        Raises:
            StepFailed: another process has failed.
        """
        self._take(self.reducer.start(weights))

    def finish(self, loss: Tensor) -> tuple[float, float]:
        """After backward: update what was held, unless a number is not finite.

        Args:
            loss: a scalar on the device of the weights, read together with the norm.
        Returns:
            loss and norm of all gradients, not clipped. The norm is the same on all processes.
        Raises:
            StepFailed: another process has failed.
        """
        self._take(self.reducer.finish())
        self._norms += _norms(self._waiting)
        # A step of no trained weight has norm 0.
        total_norm = torch.linalg.vector_norm(torch.stack([torch.zeros_like(loss), *self._norms]))
        loss_value, scaled_norm = torch.stack([loss, total_norm]).tolist()
        factor = 1.0 if self.scaling is None else 1.0 / self.scaling.scale
        norm = scaled_norm * factor
        if self.max_grad_norm:
            factor *= self.max_grad_norm / max(norm, self.max_grad_norm)
        if math.isfinite(loss_value) and math.isfinite(norm):
            self._update(self._waiting, factor)
        for weight in self._waiting:
            weight.grad = None
        self._waiting = []
        return loss_value, norm

    def abort(self, order: Sequence[Weights], zero_gradients: Callable[[Weights], None]) -> None:
        """This process cannot finish the step: see `Reducer.abort`."""
        self.reducer.abort(order, zero_gradients)

    @property
    def waited_seconds(self) -> float:
        """Time that the step has waited for weights which are stored elsewhere."""
        return self.weight_store.waited_seconds() - self._waited_before

    def _take(self, weights: Weights) -> None:
        """Update weights whose gradients are final, or hold them until `finish`."""
        final: list[nn.Parameter] = []
        for weight in weights:
            if weight.grad is None:
                continue
            # On a GPU vectors wait for all others of their kind, so that few kernels serve all blocks.
            if self.holds_gradients or (weight.dim() == 1 and not is_host(weight)):
                self._waiting.append(weight)
            else:
                final.append(weight)
        self._norms += _norms(final)
        self._update(final)

    def _update(self, weights: Weights, factor: float = 1.0) -> None:
        """Update weights by their gradients times `factor`, and free the gradients."""
        if not weights:
            return
        self.has_changed_weights = True
        for part in self.weight_store.buffer_groups(weights):
            with self.weight_store.loaded(part, is_changed=True):
                began = time.perf_counter()
                for group in self.optimizer.groups(part):
                    self.optimizer.update(group, self.step, factor)
                    for weight in group:
                        weight.grad = None
                self.seconds += time.perf_counter() - began


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """L2 norm over all tensors, a fp32 scalar on their device; inf or nan where one of them holds such a number.

    Memory: on a CPU, a row chunk in fp32.
    """
    norms = _part_norms(list(tensors))
    return torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]))


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds inf or nan, and their norm is in fp32's range. One wait for the device."""
    return bool(torch.isfinite(norm_of(tensors)))


def _norms(weights: Weights) -> list[Tensor]:
    """L2 norms of the gradients, or of their parts."""
    return _part_norms([weight.grad for weight in weights if weight.grad is not None])


def _part_norms(tensors: list[Tensor]) -> list[Tensor]:
    """L2 norms of the tensors or of their row chunks, fp32 scalars on their device.

    To form the norm of the whole of a narrow matrix, torch would make a wide copy of it.
    """
    if tensors and traits_of(tensors[0].device).has_foreach_kernels:
        return list(torch._foreach_norm(tensors, 2, torch.float32))
    norms: list[Tensor] = []
    for tensor in map(torch.atleast_1d, tensors):
        if compiled := kernels_for(tensor):
            norms.append(torch.tensor(compiled.square_sum(tensor) ** 0.5))
        else:
            norms += [torch.linalg.vector_norm(tensor[rows], dtype=torch.float32) for rows in row_chunks(tensor)]
    return norms
