"""How are many weights updated in few kernels? On a GPU starting a kernel takes longer than most of a weight's update.

The gradients of a group's weights are laid end to end, those of one shape beside each other, and so are the weights in fp32
and the state: an operation goes over all of them, or over those of one shape. The state stays what it is by name; its
tensors are views into that of the group. Norms and rates stay on the device, nothing is looked at from the host. The
formulas stand beside those for one weight (`adafactor`, `adamw`, `sinkgd`), and the random numbers of rounding are the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from devices.base import is_host, place, traits_of
from engine.optimizers.base import Optimizer, Step
from engine.optimizers.rounding import Rounding, Stochastic, round_with
from engine.sharing.sharding import Shards
from model.dropout import GOLDEN, mix

EPSILON_SCALE = 1e-3  # least RMS of a weight, so that weights near zero move
WORD = 4  # random numbers of one hash
State = tuple[
    torch.dtype, list[tuple[str, tuple[int, ...]]]
]  # tensors of the state that are one: dtype, names and shapes


class Grouped(Optimizer):
    """An optimizer that on a GPU updates small weights together."""

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        rounding: Rounding | None = None,
        factors: Mapping[str, float] | None = None,
        shards: Shards | None = None,
    ) -> None:
        super().__init__(weights, rounding, factors, shards)
        self._groups: dict[tuple[str, ...], Together] = {}  # by the names of their weights

    @abstractmethod
    def rule(self, name: str, shape: tuple[int, ...]) -> type[Together] | None:
        """How weights of this kind are updated together; None: one by one."""

    def together(self, weights: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """On a GPU the small weights of a group, so that a few kernels serve all of them."""
        if self.shards is not None or all(is_host(weight) for weight in weights):
            return super().together(weights)
        return pieces(weights, self.rounding, {id(w): self.rule(self.names[id(w)], tuple(w.shape)) for w in weights})

    @torch.no_grad()
    def update_all(self, weights: Sequence[nn.Parameter], step: Step) -> None:
        """One by one, or by few kernels for all."""
        if len(weights) == 1:
            return super().update_all(weights, step)
        names = tuple(self.names[id(weight)] for weight in weights)
        if names not in self._groups:
            rule = self.rule(names[0], tuple(weights[0].shape))
            assert rule is not None
            self._groups[names] = rule(names, weights, self.state)
        steps = [self._step_of(name, weight, step) for name, weight in zip(names, weights, strict=True)]
        rates = self._groups[names].update(weights, steps, [self._rounding_key(name, step) for name in names])
        if self.rates is not None:
            self.rates.append(rates)


def pieces(
    weights: Sequence[nn.Parameter], rounding: Rounding, rules: Mapping[int, object]
) -> list[list[nn.Parameter]]:
    """Weights with a gradient in groups that are updated together: by the same rule, of the same dtypes, and no more numbers
    than the device takes at a time; by themselves those that are larger, or rounded in another way.

    Args:
        rules: of each weight, by its id; None: by itself.
    """
    found: dict[object, list[list[nn.Parameter]]] = {}
    for weight in weights:
        if weight.grad is None:
            continue
        most, rule = traits_of(weight.device).update, rules[id(weight)]
        kind = (rule, weight.dtype, weight.grad.dtype, weight.dim())
        is_apart = weight.dtype == torch.bfloat16 and (not isinstance(rounding, Stochastic) or weight.numel() % WORD)
        if rule is None or is_apart or weight.numel() > most:
            kind = id(weight)  # type: ignore[assignment]
        lists = found.setdefault(kind, [[]])
        if lists[-1] and sum(each.numel() for each in lists[-1]) + weight.numel() > most:
            lists.append([])
        lists[-1].append(weight)
    return [group for lists in found.values() for group in lists]


@dataclass(frozen=True)
class _Alike:
    """The matrices of one shape, beside each other.

    Args:
        shape: (count, n, m). first: place of the first of them among the group's. at, rows, columns: where their numbers, and
            the statistics of their rows and columns, begin.
    """

    shape: tuple[int, int, int]
    first: int
    at: int
    rows: int
    columns: int

    def numbers(self, flat: Tensor) -> Tensor:
        """(count, n, m)."""
        return flat[self.at : self.at + math.prod(self.shape)].view(self.shape)

    def words(self, flat: Tensor) -> Tensor:
        """(count, n m / 4)."""
        size = math.prod(self.shape) // WORD
        return flat[self.at // WORD : self.at // WORD + size].view(self.shape[0], -1)

    def of_rows(self, flat: Tensor) -> Tensor:
        """(count, n)."""
        return flat[self.rows : self.rows + self.shape[0] * self.shape[1]].view(self.shape[:2])

    def of_columns(self, flat: Tensor) -> Tensor:
        """(count, m)."""
        return flat[self.columns : self.columns + self.shape[0] * self.shape[2]].view(self.shape[0], -1)

    def each(self, flat: Tensor) -> Tensor:
        """(count,) of one number a matrix."""
        return flat[self.first : self.first + self.shape[0]]


class Together(ABC):
    """Weights that are updated together. A vector counts as a matrix of one row.

    Args:
        names, weights: of one group of `pieces`. state: the optimizer's, by name.
    Memory: two fp32 copies of the weights or a few more, by the rule, and the random words of rounding, while it runs.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor], state: dict[str, Tensor]) -> None:
        self.state, self.device, self.dim = state, weights[0].device, weights[0].dim()
        shapes = [(w.shape[0], w.shape[1]) if w.dim() == 2 else (1, w.numel()) for w in weights]
        self.order = sorted(range(len(names)), key=lambda index: shapes[index])
        self.alike = _alike([shapes[index] for index in self.order])
        self.layout = self.parts_of_state([(names[index], tuple(weights[index].shape)) for index in self.order])
        self.views: dict[str, Tensor] = {}
        self.flat: list[Tensor] = []
        counts = np.array([math.prod(shapes[index]) for index in self.order], np.float32)
        self.root_inverse = place(torch.from_numpy(counts**-0.5), self.device)

    @abstractmethod
    def parts_of_state(self, weights: Sequence[tuple[str, tuple[int, ...]]]) -> list[State]:
        """Which tensors of the state are one, in which order; of weights in the order of the group: name and shape."""

    @abstractmethod
    def change(self, wide: Tensor, grad: Tensor, steps: Sequence[Step]) -> Tensor:
        """Apply gradients, laid end to end, to fp32 weights; returns what is not finite where a gradient was not.

        Args:
            steps: as each weight sees it.
        """

    def statistics(self) -> list[Tensor]:
        """The state of all weights, of which the tensors by name are views: one for each part of the layout."""
        if len(self.flat) != len(self.layout) or any(
            self.state.get(key) is not view for key, view in self.views.items()
        ):
            self.flat = []
            for dtype, entries in self.layout:
                sizes = [math.prod(shape) for _, shape in entries]
                self.flat.append(torch.zeros(sum(sizes), dtype=dtype, device=self.device))
                for (key, shape), part in zip(entries, self.flat[-1].split(sizes), strict=True):
                    view = part.view(shape)
                    if key in self.state:  # from a checkpoint
                        view.copy_(self.state[key])
                    self.state[key] = self.views[key] = view
        return self.flat

    def update(self, weights: Sequence[nn.Parameter], steps: Sequence[Step], keys: Sequence[int]) -> Tensor:
        """Apply the gradients; returns the rate of each weight, or what else tells of a gradient that was not finite.

        Args:
            steps: as each weight sees it. keys: of each weight's rounding.
        """
        weights, steps = [weights[index] for index in self.order], [steps[index] for index in self.order]
        grad = torch.cat([weight.grad.reshape(-1) for weight in weights if weight.grad is not None])
        wide = torch.cat([weight.detach().view(-1) for weight in weights]).float()
        told = self.change(wide, grad, steps)
        del grad
        self._write(weights, wide, [keys[index] for index in self.order])
        return told

    def scales(self, wide: Tensor, steps: Sequence[Step]) -> Tensor:
        """The learning rate of each weight times its RMS."""
        return self.sizes(wide).clamp_(min=EPSILON_SCALE).mul_(self.each([step.learning_rate for step in steps]))

    def subtract_(self, wide: Tensor, update: Tensor, rate: Tensor) -> None:
        """Take from each weight its update times its rate."""
        for a in self.alike:
            a.numbers(wide).addcmul_(a.numbers(update), a.each(rate)[:, None, None], value=-1.0)

    def inverse_counts(self) -> Tensor:
        """One through the columns for each row of each matrix, and one through its rows for each column."""
        means = [np.full(a.shape[0] * a.shape[1], 1 / a.shape[2], np.float32) for a in self.alike]
        means += [np.full(a.shape[0] * a.shape[2], 1 / a.shape[1], np.float32) for a in self.alike]
        return place(torch.from_numpy(np.concatenate(means)), self.device)

    def sizes(self, flat: Tensor) -> Tensor:
        """The root mean square of each matrix."""
        norms = torch.empty_like(self.root_inverse)
        for a in self.alike:
            torch.linalg.vector_norm(a.numbers(flat), dim=(1, 2), out=a.each(norms))
        return norms.mul_(self.root_inverse)

    def each(self, numbers: Sequence[float]) -> float | Tensor:
        """One number for all weights, or one for each."""
        if len(set(numbers)) == 1:
            return numbers[0]
        return place(torch.from_numpy(np.array(numbers, np.float32)), self.device)

    def decay_(self, wide: Tensor, steps: Sequence[Step]) -> None:
        kept = [1.0 - step.learning_rate * step.weight_decay for step in steps]
        if set(kept) == {1.0}:
            return
        for a in self.alike:
            these = set(kept[a.first : a.first + a.shape[0]])
            keep = self.each(kept[a.first : a.first + a.shape[0]])
            a.numbers(wide).mul_(keep if len(these) == 1 else keep[:, None, None])  # type: ignore[index]

    def _write(self, weights: Sequence[nn.Parameter], wide: Tensor, keys: Sequence[int]) -> None:
        """Store fp32 values, rounded by chance where the weights are bf16."""
        if weights[0].dtype == torch.bfloat16:
            wide = round_with(wide, self._noise(wide.numel(), keys))
        parts = wide.split([weight.numel() for weight in weights])
        targets = [weight.data.view(-1) for weight in weights]
        torch._foreach_copy_(targets, list(parts))

    def _noise(self, count: int, keys: Sequence[int]) -> Tensor:
        """One random number (int16) for each number of the weights."""
        longest = max(a.shape[1] * a.shape[2] for a in self.alike) // WORD
        counters = torch.arange(1, longest + 1, device=self.device).mul_(GOLDEN)
        key = place(torch.from_numpy(np.array(keys, np.int64)), self.device)
        words = torch.empty(count // WORD, dtype=torch.int64, device=self.device)
        for a in self.alike:
            of_these = a.words(words)
            torch.add(a.each(key)[:, None], counters[: of_these.shape[1]], out=of_these)
        del counters
        return mix(words).view(torch.int16)


def _alike(shapes: Sequence[tuple[int, int]]) -> list[_Alike]:
    found, place_of, at, rows = [], 0, 0, 0
    columns = sum(n for n, _ in shapes)
    while place_of < len(shapes):
        n, m = shapes[place_of]
        count = sum(shape == (n, m) for shape in shapes)
        found.append(_Alike((count, n, m), place_of, at, rows, columns))
        place_of, at, rows, columns = place_of + count, at + count * n * m, rows + count * n, columns + count * m
    return found
