"""The optimizer in backward: each block is updated as soon as its gradients are complete, and they are freed.

    apply(weights):   all-reduce over the processes -> finite check -> update -> free the gradients
    finish():         what was held until the end: for clipping the global norm all gradients, which the plan prices

Before backward nothing has been updated, so a step whose loss is not finite is left out without a trace. When loss and gradients
are found to be finite, or not, depends on where they are; a GPU is waited for once a step:

    on a CPU:                      the loss before backward, the gradients' norm after it
    on a GPU:                      the loss before backward, and with it the norm of the last step's gradients
    with a scaled loss:            as on a GPU; blocks that are not finite were left out where they lie (`engine.loss_scaling`)
    all gradients held, on a GPU:  losses and norm after backward, before anything is changed

Norms are Euclidean: on a CPU those take a fortieth of the time of largest magnitudes, and where a norm leaves fp32 the run is lost
anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from devices.base import is_host, traits_of
from devices.kernels.calls import kernels_for
from engine.all_reduce import Reducer, Weights
from engine.loss_scaling import LossScaling
from engine.optimizers import Optimizer, Step
from engine.optimizers.base import row_chunks
from engine.weights import WeightStore


class NotFinite(Exception):
    """A loss or a gradient is inf or nan: of this step, and nothing was updated; or as `Lost` says."""


class Lost(NotFinite):
    """A gradient of the step before was inf or nan, and the weights have taken it."""


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
        self.optimizer, self.max_grad_norm, self.scaling = optimizer, max_grad_norm, scaling
        self.weight_store = weight_store or WeightStore(torch.float32)
        self.reducer = reducer
        self.holds_all = max_grad_norm > 0  # gradients, until backward has ended
        self.unchecked_norm: Tensor | None = None  # of the last step's gradients, where the next step checks it
        self.begin(Step(1, 0.0))

    def begin(self, step: Step) -> None:
        """A step begins."""
        self._run_step = step
        if self.scaling is not None:
            self._before = replace(self.scaling), self.unchecked_norm
            self._last_scale, self.scaling.in_use = self.scaling.in_use, self.scaling.scale
        self._number_step()
        # what the caller reads of the step
        self.has_changed_weights = False  # then it cannot be run again
        # whether all gradients are; if not, `has_changed_weights` says whether the weights are lost
        self.is_finite = True
        # gradients overflowed at their loss scale: this step's if all are held, else the last one's
        self.is_skipped = False
        self.known_loss: float | None = None  # of the step's passes, if it was read from a GPU
        self.seconds = 0.0  # that its updates took on the host, without waiting for weights
        # what waits for the end of backward
        self._held: list[nn.Parameter] = []
        self._vectors: list[nn.Parameter] = []  # on a GPU
        self._norms: list[Tensor] = []  # of each block's gradients, on the device
        self._unchecked_losses: list[Tensor] = []
        # with a scaled loss: id of a weight -> whether all gradients of its block are finite
        self._block_is_finite: dict[int, Tensor] = {}
        if self.reducer is not None:
            self.reducer.begin()

    def check_loss(self, loss: Tensor) -> None:
        """Abort a step whose loss (scalar) is not finite; before backward. One wait for the device, unless all gradients are held.

        Raises:
            NotFinite: this process's loss is not. Lost: an earlier step's gradients were not.
        """
        if self.holds_all and not is_host(loss):
            self._unchecked_losses.append(loss)  # `finish` reads them with the norm
            return
        last_norm, self.unchecked_norm = self.unchecked_norm, None
        is_loss_bad, *is_norm_bad = self._not_finite([loss] if last_norm is None else [loss, last_norm])
        if self.scaling is not None:
            self._count_last_step(not any(is_norm_bad) if is_norm_bad else None)
        elif any(is_norm_bad):
            raise Lost
        if is_loss_bad:
            raise NotFinite

    def _not_finite(self, scalars: Sequence[Tensor]) -> list[bool]:
        """Which of loss and norm are inf or nan on this process."""
        stacked = torch.stack(list(scalars))
        if is_host(stacked):
            return list((~torch.isfinite(stacked)).tolist())
        loss, *_ = numbers = stacked.tolist()  # the one wait of a step
        self.known_loss = loss + (self.known_loss or 0.0)
        return [not math.isfinite(number) for number in numbers]

    def apply(self, weights: Weights) -> None:
        """Take weights whose gradients this process has completed, and update those whose gradients are final.

        Raises:
            StepFailed: another process has failed.
        """
        self._apply(weights if self.reducer is None else self.reducer.start(weights))

    def finish(self) -> None:
        """After backward: update what waited for its end, or leave that out; and see to it that the gradients are checked.

        Raises:
            StepFailed: another process has failed. NotFinite: this process's loss is not, as a GPU now tells; so is its gradient,
                which all processes have a part in; none updates.
        """
        if self.reducer is not None:
            self._apply(self.reducer.finish())
        vectors, self._vectors = self._vectors, []
        self._update(vectors, self._unscaling)
        held, self._held = [weight for weight in self._held if weight.grad is not None], []
        norms, self._norms = self._norms, []
        if held:
            self._update_held(held)
        elif norms and (self.scaling is not None or not is_host(norms[0])):
            self.unchecked_norm = norm_of(norms)
        else:
            self.is_finite = is_finite(norms)

    def _update_held(self, held: Weights) -> None:
        """Unscale, clip and apply all gradients of a step; or drop them all."""
        norm = self._read_norm(norm_of(_gradients(held)))
        if self.scaling is None:
            self.is_finite = math.isfinite(norm)
        else:  # a scale that was too large takes the blame
            self.is_skipped = not self.scaling.admits(math.isfinite(norm))
        if self.is_skipped or not self.is_finite:
            for weight in held:
                weight.grad = None
            return
        scale = 1.0 if self.scaling is None else self.scaling.in_use
        factor = 1.0 / scale
        if self.max_grad_norm:
            factor *= self.max_grad_norm / max(norm / scale, self.max_grad_norm)
        self._update(held, factor)

    def restore_scale(self) -> None:
        """The loss scale from before the step, where another process has left the step out for all; the last one counts again."""
        if self.scaling is not None:
            before, self.unchecked_norm = self._before
            self.scaling.in_use = self._last_scale
            for name, value in before.as_dict().items():
                setattr(self.scaling, name, value)

    def scaling_state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of the loss scale; None without one."""
        if self.scaling is None or self.unchecked_norm is None:
            return None if self.scaling is None else self.scaling.as_dict()
        last = is_finite([self.unchecked_norm])
        return replace(self.scaling, last_finite=last, last_scale=self.scaling.in_use).as_dict()

    def _number_step(self) -> None:
        """Number this step for the optimizer, without those that were left out."""
        skipped = 0 if self.scaling is None else self.scaling.skipped_steps
        self.step = replace(self._run_step, number=self._run_step.number - skipped)

    def _count_last_step(self, was_finite: bool | None) -> None:
        """Count the last step; None: as a checkpoint says, if it has not been counted."""
        assert self.scaling is not None
        scale = self._last_scale
        if was_finite is None:
            was_finite, scale = self.scaling.last_finite, self.scaling.last_scale
            self.scaling.last_finite = None
        if was_finite is not None:
            self.is_skipped = not self.scaling.admits(was_finite, scale)
            self._number_step()

    def _read_norm(self, norm: Tensor) -> float:
        """The norm of all gradients; on a GPU the one wait of a step, which also reads the losses."""
        if is_host(norm):
            return float(norm)
        *losses, number = torch.stack([*self._unchecked_losses, norm]).tolist()
        self._unchecked_losses, self.known_loss = [], sum(losses)
        if not math.isfinite(self.known_loss):
            raise NotFinite
        return float(number)

    def _apply(self, weights: Weights) -> None:
        """Take weights whose gradients are final."""
        if self.holds_all:
            self._held += weights
            return
        if gradients := _gradients(weights):
            self._norms.append(norm_of(gradients))
            if self.scaling is not None:
                self._block_is_finite |= dict.fromkeys(map(id, weights), torch.isfinite(self._norms[-1]))

        def is_later(weight: nn.Parameter) -> bool:
            """On a GPU vectors are updated at the end with all others of their kind, so that few kernels serve all blocks."""
            return weight.dim() == 1 and weight.grad is not None and not is_host(weight)

        self._vectors += [weight for weight in weights if is_later(weight)]
        self._update([weight for weight in weights if not is_later(weight)], self._unscaling)

    @property
    def _unscaling(self) -> float:
        return 1.0 if self.scaling is None else 1.0 / self.scaling.in_use

    def _update(self, weights: Weights, factor: float) -> None:
        weights = [weight for weight in weights if weight.grad is not None]  # frozen ones have none
        if not weights:
            return
        self.has_changed_weights = True
        for part in self.weight_store.buffer_groups(weights):
            with self.weight_store.loaded(part, is_changed=True):
                began = time.perf_counter()
                for group in self.optimizer.groups(part):
                    gradients = _gradients(group)
                    # in fp16 small results would vanish: there it is multiplied when it becomes fp32
                    is_later = gradients[0].dtype == torch.float16
                    if factor != 1.0 and not is_later:
                        _multiply(gradients, factor)
                    finite = None
                    if self._block_is_finite:
                        finite = torch.stack([self._block_is_finite[id(weight)] for weight in group])
                    del gradients
                    self.optimizer.update(group, self.step, factor if is_later else 1.0, finite)
                    for weight in group:
                        weight.grad = None
                self.seconds += time.perf_counter() - began


def _multiply(gradients: list[Tensor], factor: float) -> None:
    if len(gradients) > 1:
        torch._foreach_mul_(gradients, factor)
    else:  # as on CPUs, where foreach rounds the factor to the gradient's dtype
        gradients[0].mul_(factor)


def _gradients(weights: Weights) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """L2 norm over all tensors, a fp32 scalar on their device; inf or nan where one of them holds such a number.

    Memory: on a CPU, a row chunk in fp32.
    """
    tensors = list(tensors)
    if tensors and traits_of(tensors[0].device).is_multi_tensor:
        norms = list(torch._foreach_norm(tensors, 2, torch.float32))
    else:
        norms = [norm for tensor in tensors for norm in _norms(tensor)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _norms(tensor: Tensor) -> Iterator[Tensor]:
    """Of row chunks, where torch would widen a whole narrow matrix to form its norm."""
    if compiled := kernels_for(tensor):
        yield torch.tensor(compiled.square_sum(tensor) ** 0.5)
        return
    is_widened = is_host(tensor) and tensor.dtype != torch.float32 and tensor.dim() > 0
    for part in (tensor[rows] for rows in row_chunks(tensor)) if is_widened else (tensor,):
        yield torch.linalg.vector_norm(part, dtype=torch.float32)


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds inf or nan, and their norm is in fp32's range. One wait for the device."""
    return bool(torch.isfinite(norm_of(tensors)))
