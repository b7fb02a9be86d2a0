"""Are the numbers of a step finite? Asked where an answer is cheap: of the loss before backward, of gradients by their norms.

Before backward nothing has been updated, so a step whose loss is not finite is left out without a trace. Gradients are
updated block by block inside the walk: their norms stay on the device and are looked at once, after it. Where all gradients
are held until the walk has ended, nothing has been changed before: there a GPU is asked once, for losses and norm. Norms are
Euclidean: on a CPU those take a fortieth of the time of largest magnitudes, and where a norm leaves fp32 the run is lost
anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from devices.base import is_host, traits_of
from devices.kernels.calls import kernels, takes
from engine.optimizers.base import row_chunks
from engine.sharing.sharding import Shards

OnReady = Callable[[Sequence[nn.Parameter]], None]


class NotFinite(Exception):
    """The loss of this step is inf or nan; nothing was updated."""


class Lost(NotFinite):
    """A gradient of the step before was inf or nan, and the weights have taken it."""


class StepChecks:
    """Looks at the loss of every step.

    Args:
        shards: where weights are sharded, all processes gather them together and so stop together; one small sum more.
    """

    def __init__(self, shards: Shards | None = None) -> None:
        self.shards = shards
        self.seen_loss: float | None = None  # of this step's walks, where it was looked at
        self.earlier: Tensor | None = None  # norm of the gradients of the last step, to be looked at in the next one
        self.is_late = False  # whether a GPU is asked for the loss together with the norm of all gradients
        self._unseen: list[Tensor] = []  # losses until then
        self.first: str | None = None  # where the first number that is not finite came from, in words, if that is known

    def begin(self) -> None:
        """A step begins."""
        self.first = self.seen_loss = None
        self._unseen = []

    def watching(self, on_ready: OnReady) -> OnReady:
        """The callback of the walk."""
        return on_ready

    def loss(self, loss: Tensor) -> None:
        """Abort a step whose loss is not finite; before backward. One wait for the device.

        On a GPU that is the only one of a step: it also reads the loss itself, and the norm of the last step's gradients.

        Args:
            loss: scalar.
        Raises:
            NotFinite: this process's loss is not; with `shards`, that of any process. Lost: an earlier step's gradients were not.
        """
        if self.is_late and not is_host(loss):
            self._unseen.append(loss)
            return
        earlier, self.earlier = self.earlier, None
        looked = torch.stack([loss] if earlier is None else [loss, earlier])
        if is_host(loss):
            told = (~torch.isfinite(looked)).float()
            bad, *lost = (told if self.shards is None else self.shards.sum(told)).tolist()
        else:
            numbers = looked.tolist()
            bad, *lost = [float(not math.isfinite(number)) for number in numbers]
            if self.shards is not None:
                bad, *lost = self.shards.sum_numbers(bad, *lost)
            self.seen_loss = numbers[0] + (self.seen_loss or 0.0)
        if any(lost):
            raise Lost
        if bad:
            raise NotFinite

    def late(self, norm: Tensor) -> float:
        """The norm of all gradients, which `Update` holds; its wait also reads the losses, of which `seen_loss` is the sum."""
        *losses, number = torch.stack([*self._unseen, norm]).tolist()
        self._unseen, self.seen_loss = [], sum(losses)
        return float(number)


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
    if (compiled := kernels()) is not None and takes(tensor):
        yield torch.tensor(compiled.square_sum(tensor) ** 0.5)
        return
    is_widened = is_host(tensor) and tensor.dtype != torch.float32 and tensor.dim() > 0
    for part in (tensor[rows] for rows in row_chunks(tensor)) if is_widened else (tensor,):
        yield torch.linalg.vector_norm(part, dtype=torch.float32)


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds inf or nan, and their norm is in fp32's range. One wait for the device."""
    return bool(torch.isfinite(norm_of(tensors)))
