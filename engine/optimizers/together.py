"""How does Adafactor update many weights in few kernels? On a GPU starting a kernel takes longer than most of a weight's update.

The gradients of a group's matrices are laid end to end, those of one shape beside each other, and so are the weights in fp32
and the statistics: an operation goes over all of them, or over those of one shape. The state stays what it is by name; its
tensors are views into the statistics of the group. Norms and rates stay on the device, nothing is looked at from the host.
The formulas are those of `adafactor`, and the random numbers of rounding the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from devices.base import place
from devices.ways import way_of
from engine.optimizers.base import Step
from engine.optimizers.rounding import Rounding, Stochastic, round_with
from model.dropout import GOLDEN, mix

EPSILON_GRADIENT = 1e-30  # added to squared gradients
EPSILON_SCALE = 1e-3  # least RMS of a weight, so that weights near zero move
CLIP = 1.0  # most RMS of an update before scaling
DECAY_EXPONENT = 0.8  # second moments decay by 1 - step^-0.8
WORD = 4  # random numbers of one hash
KINDS = {2: ("rows", "columns"), 1: ("square",)}


def pieces(weights: Sequence[nn.Parameter], rounding: Rounding) -> list[list[nn.Parameter]]:
    """Weights with a gradient in groups that are updated together: of the same dtypes, and no more numbers than the device
    takes at a time; by themselves those that are larger, or rounded in another way."""
    found: dict[object, list[list[nn.Parameter]]] = {}
    for weight in weights:
        if weight.grad is None:
            continue
        most, kind = way_of(weight.device).update, (weight.dtype, weight.grad.dtype, weight.dim())
        is_apart = weight.dtype == torch.bfloat16 and (not isinstance(rounding, Stochastic) or weight.numel() % WORD)
        if is_apart or weight.numel() > most:
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


class Together:
    """Weights that are updated together. A vector counts as a matrix of one row that has a statistic for each number.

    Args:
        names, weights: of one group of `pieces`. state: the optimizer's, by name.
    Memory: two fp32 copies of the weights, and the random words of rounding, while it runs; for good, 8 bytes a row and column.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor], state: dict[str, Tensor]) -> None:
        self.state, self.device, self.dim = state, weights[0].device, weights[0].dim()
        shapes = [(w.shape[0], w.shape[1]) if w.dim() == 2 else (1, w.numel()) for w in weights]
        self.order = sorted(range(len(names)), key=lambda index: shapes[index])
        self.alike = _alike([shapes[index] for index in self.order])
        self.keys = self._keys([names[index] for index in self.order], [shapes[index] for index in self.order])
        self.flat: Tensor | None = None
        self.views: dict[str, Tensor] = {}
        counts = np.array([math.prod(shapes[index]) for index in self.order], np.float32)
        self.root_inverse = place(torch.from_numpy(counts**-0.5), self.device)
        if self.dim == 2:
            means = [np.full(a.shape[0] * a.shape[1], 1 / a.shape[2], np.float32) for a in self.alike]
            means += [np.full(a.shape[0] * a.shape[2], 1 / a.shape[1], np.float32) for a in self.alike]
            self.inverse = place(torch.from_numpy(np.concatenate(means)), self.device)

    def _keys(self, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
        """Name and size of each state tensor, in their order."""
        if self.dim == 1:
            return [(f"{name}/square", m) for name, (_, m) in zip(names, shapes, strict=True)]
        pairs = list(zip(names, shapes, strict=True))
        return [*((f"{name}/rows", n) for name, (n, _) in pairs), *((f"{name}/columns", m) for name, (_, m) in pairs)]

    def statistics(self) -> Tensor:
        """The state of all weights, of which the tensors by name are views."""
        if self.flat is None or any(self.state.get(key) is not view for key, view in self.views.items()):
            self.flat = torch.zeros(sum(size for _, size in self.keys), device=self.device)
            self.views = dict(zip([k for k, _ in self.keys], self.flat.split([s for _, s in self.keys]), strict=True))
            for key, view in self.views.items():
                if key in self.state:  # from a checkpoint
                    view.copy_(self.state[key])
                self.state[key] = view
        return self.flat

    def update(self, weights: Sequence[nn.Parameter], steps: Sequence[Step], keys: Sequence[int]) -> Tensor:
        """Apply the gradients; returns the rate of each weight, which is not finite where its gradient was not.

        Args:
            steps: as each weight sees it. keys: of each weight's rounding.
        """
        weights, steps = [weights[index] for index in self.order], [steps[index] for index in self.order]
        grad = torch.cat([weight.grad.reshape(-1) for weight in weights if weight.grad is not None])
        wide = torch.cat([weight.detach().view(-1) for weight in weights]).float()
        scale = self._each([step.learning_rate for step in steps])
        rate = self._sizes(wide).clamp_(min=EPSILON_SCALE)
        update, factor = self._unclipped(grad, steps[0].number)
        del grad
        clip = self._sizes(update).mul_(factor).clamp_(min=CLIP).div_(CLIP)
        rate = rate.mul_(factor).div_(clip).mul_(-scale)
        self._decay_(wide, steps)
        for a in self.alike:
            a.numbers(wide).addcmul_(a.numbers(update), a.each(rate)[:, None, None])
        del update
        self._write(weights, wide, [keys[index] for index in self.order])
        return rate

    def _sizes(self, flat: Tensor) -> Tensor:
        """The root mean square of each matrix."""
        norms = torch.empty_like(self.root_inverse)
        for a in self.alike:
            torch.linalg.vector_norm(a.numbers(flat), dim=(1, 2), out=a.each(norms))
        return norms.mul_(self.root_inverse)

    def _each(self, numbers: Sequence[float]) -> float | Tensor:
        """One number for all weights, or one for each."""
        if len(set(numbers)) == 1:
            return numbers[0]
        return place(torch.from_numpy(np.array(numbers, np.float32)), self.device)

    def _unclipped(self, grad: Tensor, number: int) -> tuple[Tensor, Tensor | float]:
        """The update but for a factor, and the factor of each weight; moves the statistics."""
        decay, state = 1.0 - number**-DECAY_EXPONENT, self.statistics()
        if self.dim == 1:
            state.lerp_(grad.float().square().add_(EPSILON_GRADIENT), 1.0 - decay)
            return state.rsqrt().mul_(grad), 1.0
        square = torch.empty_like(state)
        for a in self.alike:
            both = a.numbers(grad)
            torch.linalg.vector_norm(both, dim=2, dtype=torch.float32, out=a.of_rows(square))
            torch.linalg.vector_norm(both, dim=1, dtype=torch.float32, out=a.of_columns(square))
        state.lerp_(square.square_().mul_(self.inverse).add_(EPSILON_GRADIENT), 1.0 - decay)
        factors, update = state.rsqrt(), torch.empty(grad.numel(), device=self.device)
        for a in self.alike:
            part = torch.mul(a.numbers(grad), a.of_rows(factors).unsqueeze(2), out=a.numbers(update))
            part.mul_(a.of_columns(factors).unsqueeze(1))
        means = [a.of_rows(state).mean(1) for a in self.alike]
        return update, (means[0] if len(means) == 1 else torch.cat(means)).sqrt_()

    def _decay_(self, wide: Tensor, steps: Sequence[Step]) -> None:
        kept = [1.0 - step.learning_rate * step.weight_decay for step in steps]
        if set(kept) == {1.0}:
            return
        for a in self.alike:
            these = set(kept[a.first : a.first + a.shape[0]])
            keep = self._each(kept[a.first : a.first + a.shape[0]])
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
    """Matrices of one shape, which follow each other."""
    found, place_of, at, rows = [], 0, 0, 0
    columns = sum(n for n, _ in shapes)
    while place_of < len(shapes):
        n, m = shapes[place_of]
        count = sum(shape == (n, m) for shape in shapes)
        found.append(_Alike((count, n, m), place_of, at, rows, columns))
        place_of, at, rows, columns = place_of + count, at + count * n * m, rows + count * n, columns + count * m
    return found
