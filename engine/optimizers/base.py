"""What all optimizers share: weights of one shape, as (count, n, m), are changed by one rule as soon as their gradients are complete.

On a CPU the count is 1, and gradients are freed one by one. A GPU takes longer to start a kernel than for most of a weight's
update: there small weights of one shape are stacked, and nothing is looked at from the host. Large weights are updated in row
chunks. State is held by name in plain tensors, so that it can be planned, saved and moved; no `torch.optim`, whose import
costs 80 MB. Weight decay is folded into the fp32 update before rounding: applied alone to bf16 it would vanish.

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
from engine.optimizers.rounding import Keys, rounding_key, write_rounded
from limits import UPDATE_ELEMENTS
from model.shapes import is_block_matrix, is_matrix

EPSILON_SCALE = 1e-3  # least RMS of a weight that its steps are scaled by, so that weights near zero move
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


@dataclass(frozen=True)
class Group:
    """Weights of one shape that are updated together.

    Args:
        weight: (count, n, m), of several a copy. grad: likewise; may be overwritten.
        state: kind -> (count, ...). step: as these weights see it.
        is_block_matrix: whether they are matrices of blocks, and not tables, head or vectors.
        keys: of each weight's stochastic rounding. factor: on the gradient.
    """

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    step: Step
    is_block_matrix: bool
    keys: Keys
    factor: float = 1.0

    def gradient(self, rows: slice = ALL_ROWS) -> Tensor:
        """Rows of the gradients as fp32; may be overwritten."""
        wide = self.grad[:, rows].float()
        return wide if self.factor == 1.0 else wide * self.factor

    def chunks(self) -> Iterator[slice]:
        """Rows that are updated at a time."""
        return row_chunks(self.weight[0])

    def norm(self, parts: Iterable[Tensor]) -> float | Tensor:
        """The L2 norm of each matrix that comes in parts of its rows; on a GPU (count, 1, 1), which stay there."""
        norms = [torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32) for x in parts]
        if is_host(self.weight):
            return sum(float(norm) ** 2 for norm in norms) ** 0.5
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)

    def scaled_rate(self) -> float | Tensor:
        """The learning rate times each weight's RMS."""
        return self.step.learning_rate * at_least(EPSILON_SCALE, self.root_mean_square())

    def root_mean_square(self) -> float | Tensor:
        """The RMS of each weight."""
        count = self.weight[0].numel()
        if compiled := kernels_for(self.weight):
            return (compiled.square_sum(self.weight) / count) ** 0.5  # type: ignore[no-any-return]
        return self.norm(self.weight[:, rows] for rows in self.chunks()) / count**0.5

    def read(self, rows: slice) -> Tensor:
        """Rows of the weights as fp32, decayed, to be overwritten."""
        values = self.weight[:, rows].float()
        keep = self.step.learning_rate * self.step.weight_decay
        return values.mul_(1.0 - keep) if keep else values

    def write(self, rows: slice, values: Tensor) -> None:
        write_rounded(self.weight[:, rows], values, self.keys, rows.start * self.weight.shape[2])

    def subtract(self, rows: slice, update: Tensor, rate: float | Tensor) -> None:
        """Decay rows of the weights and take `update` times `rate` from them; on a GPU the update is overwritten."""
        values = self.read(rows)
        if isinstance(rate, Tensor):
            values.sub_(update.mul_(rate))
        else:
            values.sub_(update, alpha=rate)
        del update
        self.write(rows, values)


class Optimizer(ABC):
    """Changes weights by their gradients.

    Args:
        weights: name -> weight, in a fixed order; the order numbers the weights for the rounding.
    """

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
    ) -> None:
        self.weights = weights
        self.names = {id(weight): name for name, weight in weights.items()}
        self.index = {name: index for index, name in enumerate(weights)}
        self.state: dict[str, Tensor] = {}
        # on a GPU, keys of the rounding in one step, and the groups that have been rounded in it, in order
        self._placed_for = 0, 0
        self._placed: dict[tuple[str, ...], Tensor] = {}
        self._rounded: dict[tuple[str, ...], None] = {}
        self._stacked: dict[tuple[str, ...], tuple[Tensor, list[Tensor]]] = {}  # on a GPU: of which `state` holds views

    @abstractmethod
    def layout(self, name: str, shape: tuple[int, ...]) -> StateLayout:
        """The state of one weight: kind -> shape and dtype. `optimizers.py` says its bytes to the plan."""

    @abstractmethod
    def _update(self, group: Group) -> None:
        """The rule."""

    def groups(self, weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Those of some weights that have a gradient, as `update` takes them."""
        groups: list[list[nn.Parameter]] = []
        growing: dict[object, list[nn.Parameter]] = {}
        for weight in weights:
            if weight.grad is None:
                continue
            name, shape, most = self.names[id(weight)], tuple(weight.shape), traits_of(weight.device).update
            is_alone = is_host(weight)
            facts = weight.dtype, weight.grad.dtype, is_matrix(name, shape), is_block_matrix(name, shape)
            kind = name if is_alone else (shape, *facts)
            if kind not in growing or (len(growing[kind]) + 1) * weight.numel() > most:
                growing[kind] = []
                groups.append(growing[kind])
            growing[kind].append(weight)
        return groups

    @torch.no_grad()
    def update(self, weights: Sequence[nn.Parameter], step: Step, factor: float = 1.0) -> None:
        """Apply the gradients of one of `groups`, times `factor`; they may be overwritten, and the caller frees them."""
        names, shape = [self.names[id(weight)] for weight in weights], tuple(weights[0].shape)
        # Norms and position biases say how large something is; smaller is not simpler there.
        # Source: BERT's `exclude_from_weight_decay`, which most recipes have taken over.
        decay = step.weight_decay if is_matrix(names[0], shape) else 0.0
        decayed_step = replace(step, weight_decay=decay)
        keys = self._keys(tuple(names), step, weights[0])
        weight = _stack([weight.data for weight in weights])
        grad = _stack([weight.grad for weight in weights if weight.grad is not None])
        state = self._state(names, weights[0])
        is_inner = is_block_matrix(names[0], shape)
        if factor != 1.0 and grad.dtype != torch.float16:
            grad.mul_(factor)
            factor = 1.0  # In fp16 small results would vanish: there `Group.gradient` multiplies what it has widened.
        self._update(Group(weight, grad, state, decayed_step, is_inner, keys, factor))
        if len(weights) > 1:
            torch._foreach_copy_([each.data for each in weights], [x.view(shape) for x in weight.unbind()])

    def place_keys(self, step: Step) -> None:
        """Bring to a GPU the keys of this step's rounding, of the groups that the step before has rounded."""
        device = next(iter(self.weights.values())).device
        known = {names: place(torch.tensor(self._keys_of(names, step)), device) for names in self._rounded}
        self._placed_for, self._placed, self._rounded = (step.seed, step.number), known, {}

    def _keys_of(self, names: Sequence[str], step: Step) -> list[int]:
        return [rounding_key(step.seed, step.number, self.index[name]) for name in names]

    def _keys(self, names: tuple[str, ...], step: Step, like: Tensor) -> Keys:
        if like.device.type == "cpu" or like.dtype != torch.bfloat16:
            return self._keys_of(names, step)
        if self._placed_for != (step.seed, step.number):
            self.place_keys(step)
        if names not in self._placed:
            self._placed[names] = place(torch.tensor(self._keys_of(names, step)), like.device)
        self._rounded[names] = None
        return self._placed[names]

    def _state(self, names: Sequence[str], like: nn.Parameter) -> dict[str, Tensor]:
        """The state of a group by kind, (count, ...) each; zeros when first asked for."""
        layout = self.layout(names[0], tuple(like.shape))
        found = {}
        for kind, (shape, dtype) in layout.items():
            keys = tuple(f"{name}/{kind}" for name in names)
            if len(keys) == 1:
                if keys[0] not in self.state:
                    self.state[keys[0]] = torch.zeros(shape, device=like.device, dtype=dtype)
                found[kind] = self.state[keys[0]].unsqueeze(0)
                continue
            whole, views = self._stacked.get(keys, (None, []))
            if whole is None or any(self.state.get(key) is not view for key, view in zip(keys, views, strict=True)):
                whole = torch.zeros(len(keys), *shape, device=like.device, dtype=dtype)
                views = list(whole.unbind())
                for key, view in zip(keys, views, strict=True):
                    if key in self.state:  # from a checkpoint
                        view.copy_(self.state[key])
                    self.state[key] = view
                self._stacked[keys] = whole, views
            found[kind] = whole
        return found

    def incomplete(self) -> list[str]:
        """Names of the weights whose state is not all there, or has another form, once a step has been made."""

        def is_whole(name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
            state = self.state.get(f"{name}/{kind}")
            return state is not None and tuple(state.shape) == shape and state.dtype == dtype

        return [
            name
            for name, weight in self.weights.items()
            if not all(is_whole(name, kind, *form) for kind, form in self.layout(name, tuple(weight.shape)).items())
        ]

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over saved state; raises KeyError where it belongs to no weight of this model."""
        for key, value in state.items():
            if key.rpartition("/")[0] not in self.weights:
                raise KeyError(key)
            self.state[key] = value


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Matrices as (count, n, m), vectors as (count, 1, m); of one a view."""
    found = tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))
    return found.view(len(tensors), -1, found.shape[-1])


def at_least(low: float, value: float | Tensor) -> float | Tensor:
    """The larger of two numbers, of which one may be on a GPU."""
    return value.clamp_(min=low) if isinstance(value, Tensor) else max(low, value)


def row_chunks(tensor: Tensor) -> Iterator[slice]:
    """Cut the first dimension so that a chunk holds at most what is updated at a time (and at least one row)."""
    elements = UPDATE_ELEMENTS if is_host(tensor) else traits_of(tensor.device).update
    rows = max(1, elements // max(1, tensor[0].numel()))
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, min(start + rows, tensor.shape[0]))
