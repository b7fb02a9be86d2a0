"""What is an optimizer to the engine? Something that updates one weight, in row chunks, as soon as its gradient is complete.

The state is held by name in plain tensors, so that it can be planned, saved and moved; no `torch.optim`, whose import
costs 80 MB. Weight decay is folded into the fp32 update before rounding: applied alone to bf16 it would vanish.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from devices.base import is_host, traits_of
from devices.kernels.calls import kernels, takes
from engine.optimizers.rounding import Rounding, Stochastic, rounding_key
from engine.sharing.sharding import Part, Shards
from limits import UPDATE_ELEMENTS
from model.shapes import is_matrix

REMAINDER = "remainder"  # kind of the state that a rounding keeps


@dataclass(frozen=True)
class Step:
    """What an update needs to know of the step.

    Args:
        number: counted from 1. learning_rate: at this step. weight_decay: times the learning rate, per step.
        seed: of the stochastic rounding.
    """

    number: int
    learning_rate: float
    weight_decay: float = 0.0
    seed: int = 0


class Optimizer(ABC):
    """Updates weights one at a time.

    Args:
        weights: name -> weight, in a fixed order; the order numbers the weights for the rounding.
        rounding: how bf16 weights are read and written.
        factors: name -> factor on the learning rate of a weight; 1 where absent.
        shards: where processes hold parts of the weights: which, and how sums are formed.
    """

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        rounding: Rounding | None = None,
        factors: Mapping[str, float] | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.weights, self.rounding, self.factors = weights, rounding or Stochastic(), factors or {}
        self.names = {id(weight): name for name, weight in weights.items()}
        self.index = {name: index for index, name in enumerate(weights)}
        self.state: dict[str, Tensor] = {}
        self.shards = shards
        # on a GPU: the rates of this step's updates, which are not finite where a gradient was not; None: not told
        self.rates: list[Tensor] | None = None

    def together(self, weights: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """These weights in the groups that `update_all` takes: on a CPU one by one, so that gradients go one by one."""
        return [[weight] for weight in weights]

    def update_all(self, weights: Sequence[nn.Parameter], step: Step) -> None:
        """Apply the gradients of some weights; a group of `together`."""
        for weight in weights:
            self.update(weight, step)

    @torch.no_grad()
    def update(self, weight: nn.Parameter, step: Step) -> None:
        """Apply `weight.grad` to `weight`. The gradient may be overwritten; the caller frees it."""
        if weight.grad is not None:
            name = self.names[id(weight)]
            self._update(name, weight.data, weight.grad, self._step_of(name, weight, step))

    def _step_of(self, name: str, weight: Tensor, step: Step) -> Step:
        if (factor := self.factors.get(name, 1.0)) != 1.0:
            step = replace(step, learning_rate=step.learning_rate * factor)
        # norms, DoRA's magnitudes and position biases say how large something is; smaller is not simpler there.
        # Source: BERT's `exclude_from_weight_decay`, which most recipes have taken over.
        if step.weight_decay and not is_matrix(name, weight.shape):
            step = replace(step, weight_decay=0.0)
        return step

    @abstractmethod
    def _update(self, name: str, weight: Tensor, grad: Tensor, step: Step) -> None: ...

    @classmethod
    @abstractmethod
    def state_bytes(cls, shape: tuple[int, ...], name: str = "") -> int:
        """Bytes of state for a weight of this shape and name: what the plan counts."""

    def _state(self, key: str, shape: tuple[int, ...], weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """A state tensor on the weight's device, zero when first asked for."""
        if key not in self.state:
            self.state[key] = torch.zeros(shape, device=weight.device, dtype=dtype)
        return self.state[key]

    def _remainder(self, name: str, rows: slice, weight: Tensor) -> Tensor | None:
        if not self.rounding.keeps_remainder or weight.dtype != torch.bfloat16:
            return None
        return self._state(f"{name}/{REMAINDER}", weight.shape, weight, torch.int8)[rows]

    def _read(self, name: str, rows: slice, weight: Tensor) -> Tensor:
        """Rows of a weight as fp32, to be overwritten."""
        return self.rounding.read(weight[rows], self._remainder(name, rows, weight))

    def _write(self, name: str, rows: slice, weight: Tensor, values: Tensor, step: Step) -> None:
        key = None  # drawn for bf16 alone: fp32 is not rounded, and this runs for every chunk
        if weight.dtype == torch.bfloat16:
            key = self._rounding_key(name, step)
        offset = self._offset(name, rows.start, weight)
        self.rounding.write(weight[rows], values, self._remainder(name, rows, weight), key, offset)

    def _rounding_key(self, name: str, step: Step) -> int:
        return rounding_key(step.seed, step.number, self.index[name])

    def _offset(self, name: str, row: int, weight: Tensor) -> int:
        """Place of a row's first number in the whole weight, all processes counted."""
        part = self._part(name)
        return (row + (part.first if part else 0)) * weight[0].numel()

    def _part(self, name: str) -> Part | None:
        return None if self.shards is None else self.shards.parts.get(name)

    def _whole_rows(self, name: str, weight: Tensor) -> int:
        part = self._part(name)
        return part.shape[0] if part else weight.shape[0]

    def _sum(self, name: str, local: Tensor) -> Tensor:
        """Sum over the processes that hold rows of this weight; overwrites `local`."""
        return local if self.shards is None or self._part(name) is None else self.shards.sum(local)

    def _root_mean_square(self, name: str, weight: Tensor) -> float | Tensor:
        """RMS of the whole weight; on a GPU a scalar that stays there."""
        if not is_host(weight):
            count = self._whole_rows(name, weight) * weight[0].numel()
            square = torch.linalg.vector_norm(weight, dtype=torch.float32).square_()
            return self._sum(name, square).div_(count).sqrt_()
        if self._part(name) is None:
            return root_mean_square(weight)
        square = torch.tensor(root_mean_square(weight) ** 2 * weight.numel(), dtype=torch.float64)
        total = float(self._sum(name, square.to(weight.device)))
        return (total / (self._whole_rows(name, weight) * weight[0].numel())) ** 0.5

    def incomplete(self) -> list[str]:
        """Names of the weights whose state is not all there, once a step has been made."""
        held: dict[str, int] = {}
        for key, tensor in self.state.items():
            name, _, kind = key.rpartition("/")
            if kind != REMAINDER:  # it starts over at zero where weights have come to another dtype
                held[name] = held.get(name, 0) + tensor.nbytes
        needed = {name: self.state_bytes(tuple(weight.shape), name) for name, weight in self.weights.items()}
        return [name for name, size in needed.items() if held.get(name, 0) != size]

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over saved state; raises KeyError where it belongs to no weight of this model."""
        for key, value in state.items():
            if key.rpartition("/")[0] not in self.weights:
                raise KeyError(key)
            self.state[key] = value


def at_least(low: float, value: float | Tensor) -> float | Tensor:
    """The larger of two numbers, of which one may be on a GPU."""
    return value.clamp_(min=low) if isinstance(value, Tensor) else max(low, value)


def subtract_(values: Tensor, update: Tensor, rate: float | Tensor) -> Tensor:
    """values - rate x update, in place; where the rate is on a GPU, the update is overwritten."""
    return values.sub_(update.mul_(rate)) if isinstance(rate, Tensor) else values.sub_(update, alpha=rate)


def row_chunks(tensor: Tensor) -> Iterator[slice]:
    """Cut the first dimension so that a chunk holds at most what is updated at a time (and at least one row)."""
    elements = UPDATE_ELEMENTS if is_host(tensor) else traits_of(tensor.device).update
    rows = max(1, elements // max(1, tensor[0].numel()))
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, min(start + rows, tensor.shape[0]))


def root_mean_square(tensor: Tensor) -> float:
    """RMS of a weight, summed in fp32 chunks."""
    if (compiled := kernels()) is not None and takes(tensor):
        return (compiled.square_sum(tensor) / tensor.numel()) ** 0.5
    square = sum(float(torch.linalg.vector_norm(tensor[rows], dtype=torch.float32)) ** 2 for rows in row_chunks(tensor))
    return (square / tensor.numel()) ** 0.5
