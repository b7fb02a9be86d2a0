"""What all optimizers share: weights of one form are changed by one rule as soon as their gradients are final.

On a CPU each weight is updated alone, in chunks of rows that stay in its cache, and its gradient is freed. A GPU takes
longer to start a kernel than for most of a weight's update: there weights of one form are updated together, as one
tensor (count, n, m), as many as the plan has memory for, and nothing is looked at from the host. A larger weight goes
in chunks of rows. Their state lies together from the beginning, so that it is never gathered.

State is kept by name in plain tensors, so that it can be planned, saved and moved; no `torch.optim`, whose import costs
80 MB. Weight decay is folded into the fp32 update before rounding: applied alone to bf16 it would vanish.

Shapes: count weights of n rows and m columns; a vector is a matrix of one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from devices.base import is_host, place, traits_of
from devices.kernels.calls import kernels_for
from engine.optimizers.rounding import rounding_keys, write_rounded
from model.shapes import is_block_matrix, is_matrix

EPSILON_SCALE = 1e-3  # Least RMS of a weight that its steps are scaled by, so that weights near zero move.
ALL_ROWS = slice(None)
StateLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]


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


class Widened:
    """Matrices of one shape as one fp32 tensor (count, n, m), a chunk of rows at a time.

    Where one chunk holds all rows, it is the same tensor each time, and what was written to it is still there.

    Args:
        matrices: (n, m) each. factor: on what is read.
    """

    def __init__(self, matrices: list[Tensor], factor: float = 1.0) -> None:
        self.matrices = matrices
        self.factor = factor
        self.chunks = list(row_chunks(matrices[0]))
        self._whole: Tensor | None = None
        self._scales: tuple[Tensor, Tensor] | None = None

    def __getitem__(self, rows: slice) -> Tensor:
        if len(self.chunks) == 1:
            if self._whole is None:
                self._whole = self._widen(ALL_ROWS)
            return self._whole
        wide = self._widen(rows)
        if self._scales is None:
            return wide
        row_scales, column_scales = self._scales
        return (wide * row_scales[:, rows]).mul_(column_scales)

    def scale(self, row_scales: Tensor, column_scales: Tensor) -> None:
        """From now on what is read is multiplied by these, (count, n, 1) and (count, 1, m)."""
        if len(self.chunks) == 1:
            self[ALL_ROWS].mul_(row_scales).mul_(column_scales)
        else:
            self._scales = row_scales, column_scales

    def _widen(self, rows: slice) -> Tensor:
        first = self.matrices[0]
        if len(self.matrices) == 1:
            wide = first[rows].unsqueeze(0).float()
        else:
            wide = torch.empty(len(self.matrices), *first.shape, device=first.device)
            torch._foreach_copy_(wide.unbind(), self.matrices)
        return wide if self.factor == 1.0 else wide * self.factor


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one form that are updated together.

    Args:
        weight, gradient: of each; the gradients may be overwritten. state: kind -> (count, ...).
        step: as these weights see it. is_block_matrix: whether they are matrices of blocks, and not tables, head or
            vectors.
        keys: (count,) int64, of each weight's stochastic rounding.
    """

    weight: Widened
    gradient: Widened
    state: dict[str, Tensor]
    step: Step
    is_block_matrix: bool
    keys: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """count, n, m."""
        n, m = self.weight.matrices[0].shape
        return len(self.weight.matrices), n, m

    @property
    def chunks(self) -> list[slice]:
        """Rows that are updated at a time."""
        return self.weight.chunks

    def norm(self, parts: Iterable[Tensor]) -> float | Tensor:
        """The L2 norm of each matrix that comes in parts of its rows; on a GPU (count, 1, 1), which stay there."""
        norms = [torch.linalg.vector_norm(part, dim=(1, 2), keepdim=True) for part in parts]
        if is_host(self.keys):
            return sum(float(norm) ** 2 for norm in norms) ** 0.5
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)

    def root_mean_square(self) -> float | Tensor:
        """The RMS of each weight."""
        weight = self.weight.matrices[0]
        if compiled := kernels_for(weight):
            return (compiled.square_sum(weight) / weight.numel()) ** 0.5
        return self.norm(self.weight[rows] for rows in self.chunks) / weight.numel() ** 0.5

    def scaled_rate(self) -> float | Tensor:
        """The learning rate times each weight's RMS."""
        return self.step.learning_rate * at_least(EPSILON_SCALE, self.root_mean_square())

    def decayed(self, rows: slice) -> Tensor:
        """Rows of the weights after weight decay, to be overwritten and given to `write`."""
        values = self.weight[rows]
        decay = self.step.learning_rate * self.step.weight_decay
        return values.mul_(1.0 - decay) if decay else values

    def write(self, rows: slice, values: Tensor) -> None:
        """Make these values, which are overwritten, rows of the weights."""
        weights = [weight[rows] for weight in self.weight.matrices]
        write_rounded(weights, values, self.keys, rows.start * values.shape[2])

    def subtract(self, rows: slice, update: Tensor, rate: float | Tensor) -> None:
        """Decay rows of the weights and take `update` times `rate` from them."""
        values = self.decayed(rows)
        if isinstance(rate, Tensor):
            values.addcmul_(update, rate, value=-1.0)
        else:
            values.sub_(update, alpha=rate)
        self.write(rows, values)


class Optimizer(ABC):
    """Changes weights by their gradients.

    Args:
        weights: name -> weight, in a fixed order; the order numbers the weights for the rounding.
    """

    def __init__(self, weights: dict[str, nn.Parameter]) -> None:
        self.weights = weights
        self.names = {id(weight): name for name, weight in weights.items()}
        self.state: dict[str, Tensor] = {}
        # The names of all weights of a form; their state lies in one tensor a kind, in this order.
        self._families: dict[object, list[str]] = {}
        for name, weight in weights.items():
            self._families.setdefault(_form(name, weight), []).append(name)
        self._family_state: dict[object, dict[str, Tensor]] = {}
        # The keys of rounding lie in the order of the families.
        order = [name for names in self._families.values() for name in names]
        numbers = {name: number for number, name in enumerate(weights)}
        self._numbers = torch.tensor([numbers[name] for name in order])
        self._positions = {name: position for position, name in enumerate(order)}
        self._keys = torch.empty(0)
        self._keys_step: tuple[int, int] | None = None

    @abstractmethod
    def layout(self, name: str, shape: tuple[int, ...]) -> StateLayout:
        """The state of one weight: kind -> shape and dtype. `settings/optimizers.py` says its bytes to the plan."""

    @abstractmethod
    def _update(self, group: WeightGroup) -> None:
        """The rule."""

    def groups(self, weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Those of some weights that have a gradient, as `update` takes them: neighbours of one form, on a CPU each
        alone.
        """
        trained = [weight for weight in weights if weight.grad is not None]
        trained.sort(key=lambda weight: self._positions[self.names[id(weight)]])
        groups: list[list[nn.Parameter]] = []
        for weight in trained:
            if groups and self._is_next(groups[-1], weight):
                groups[-1].append(weight)
            else:
                groups.append([weight])
        return groups

    @torch.no_grad()
    def update(self, weights: Sequence[nn.Parameter], step: Step, factor: float = 1.0) -> None:
        """Apply the gradients of one of `groups`, times `factor`; they may be overwritten, and the caller frees
        them.
        """
        name = self.names[id(weights[0])]
        shape = tuple(weights[0].shape)
        if self._keys_step != (step.seed, step.number):
            self.place_keys(step)
        first = self._positions[name]
        gradients = [_as_matrix(weight.grad) for weight in weights if weight.grad is not None]
        if factor != 1.0 and is_host(weights[0]):  # Compiled kernels read gradients as they are.
            for gradient in gradients:
                gradient.mul_(factor)
            factor = 1.0
        group = WeightGroup(
            weight=Widened([_as_matrix(weight.data) for weight in weights]),
            gradient=Widened(gradients, factor),
            state=self._state(weights),
            # Norms and position biases say how large something is; smaller is not simpler there.
            # Source: BERT's `exclude_from_weight_decay`, which most recipes have taken over.
            step=step if is_matrix(name, shape) else replace(step, weight_decay=0.0),
            is_block_matrix=is_block_matrix(name, shape),
            keys=self._keys[first : first + len(weights)],
        )
        self._update(group)

    def place_keys(self, step: Step) -> None:
        """Bring the keys of a step's rounding to the device of the weights; `update` does it where nobody has
        before.
        """
        device = next(iter(self.weights.values())).device
        self._keys = place(rounding_keys(step.seed, step.number, self._numbers), device)
        self._keys_step = step.seed, step.number

    def incomplete(self) -> list[str]:
        """Names of the weights whose state is not all there, or has another form, once a step has been made."""
        return [
            name
            for name, weight in self.weights.items()
            if any(
                not _has_form(self.state.get(f"{name}/{kind}"), shape, dtype)
                for kind, (shape, dtype) in self.layout(name, tuple(weight.shape)).items()
            )
        ]

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over saved state, in parts or as a whole.

        Raises:
            KeyError: it belongs to no weight of this model.
        """
        for key, value in state.items():
            name, _, kind = key.rpartition("/")
            if name not in self.weights:
                raise KeyError(key)
            weight = self.weights[name]
            form = self.layout(name, tuple(weight.shape)).get(kind)
            if form is not None and _has_form(value, *form):
                self._state([weight], [kind])[kind].copy_(value)
            else:
                self.state[key] = value  # For `incomplete` to find.

    def _is_next(self, group: list[nn.Parameter], weight: nn.Parameter) -> bool:
        """Whether a weight can be updated together with a group, behind the last of which it lies."""
        last = group[-1]
        last_name = self.names[id(last)]
        name = self.names[id(weight)]
        traits = traits_of(weight.device)
        return (
            not traits.is_host
            and (len(group) + 1) * weight.numel() <= traits.update_elements
            and self._positions[name] == self._positions[last_name] + 1
            and _form(name, weight) == _form(last_name, last)
        )

    def _state(self, weights: Sequence[nn.Parameter], kinds: Iterable[str] = ()) -> dict[str, Tensor]:
        """State of neighbours of one form by kind, (count, ...) each; zeros when first asked for. Without `kinds`:
        all.
        """
        name = self.names[id(weights[0])]
        form = _form(name, weights[0])
        family = self._families[form]
        layout = self.layout(name, tuple(weights[0].shape))
        if form not in self._family_state:
            self._family_state[form] = {
                kind: torch.zeros(len(family), *shape, dtype=dtype, device=weights[0].device)
                for kind, (shape, dtype) in layout.items()
            }
        first = self._positions[name] - self._positions[family[0]]
        state = {}
        for kind in kinds or layout:
            state[kind] = self._family_state[form][kind][first : first + len(weights)]
            for member, value in zip(family[first:], state[kind], strict=False):
                self.state[f"{member}/{kind}"] = value
        return state


def at_least(low: float, value: float | Tensor) -> float | Tensor:
    """The larger of two numbers, of which one may be on a GPU."""
    return value.clamp_(min=low) if isinstance(value, Tensor) else max(low, value)


def row_chunks(tensor: Tensor) -> Iterator[slice]:
    """Cut the first dimension so that a chunk holds at most what is updated at a time (and at least one row)."""
    rows = max(1, traits_of(tensor.device).update_elements // max(1, tensor[0].numel()))
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, min(start + rows, tensor.shape[0]))


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _form(name: str, weight: Tensor) -> object:
    """What weights that are updated together have in common."""
    shape = tuple(weight.shape)
    return shape, weight.dtype, is_matrix(name, shape), is_block_matrix(name, shape)


def _has_form(state: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return state is not None and tuple(state.shape) == shape and state.dtype == dtype
