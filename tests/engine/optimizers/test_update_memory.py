"""An update on a GPU takes the memory that the plan counts for it: counted on meta tensors, by what lives at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from devices.base import CUDA, override_traits
from engine.optimizers import OPTIMIZERS, Step
from settings import optimizers

SIDE = 512
COUNT = 4
BF16 = torch.bfloat16
FP32 = torch.float32


class LiveBytes(TorchDispatchMode):
    """The most bytes that live at once of tensors that are made while this is on."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.counted = {tensor.untyped_storage()._cdata for tensor in before}
        self.live = self.most = 0

    def __torch_dispatch__(
        self, operation: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.most = max(self.most, self.live)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key not in self.counted:
            self.counted.add(key)
            self.live += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.counted.discard(key)
        self.live -= size


def update_bytes(name: str, storage: torch.dtype, compute: torch.dtype, count: int, elements: int) -> int:
    """The most bytes beside weights, gradients and state in an update of so many matrices, so many elements at a
    time.
    """
    step = Step(2, 0.01, weight_decay=0.1)
    with override_traits("meta", replace(CUDA, update_elements=elements, uses_pinned_memory=False)):
        names = [f"encoder.blocks.{number}.attention.q.weight" for number in range(count)]
        weights = {name: nn.Parameter(torch.zeros(SIDE, SIDE, dtype=storage, device="meta")) for name in names}
        optimizer = OPTIMIZERS[name](weights)
        for before in (True, False):  # The first update makes the state.
            for weight in weights.values():
                at_rest = weight.data
                weight.data = torch.zeros(SIDE, SIDE, dtype=compute, device="meta")
                weight.grad = torch.zeros(SIDE, SIDE, dtype=compute, device="meta")
                weight.data = at_rest
            optimizer.place_keys(step)
            gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
            live = LiveBytes([*weights.values(), *gradients, *optimizer.state.values()])
            (group,) = optimizer.groups(weights.values())
            if before:
                optimizer.update(group, step, 0.5)
            else:
                with live:
                    optimizer.update(group, step, 0.5)
    return live.most


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_takes_what_is_planned(name: str) -> None:
    facts = optimizers.OPTIMIZERS[name]
    together = []
    chunks = []
    for storage, compute in ((BF16, BF16), (BF16, FP32), (FP32, FP32)):
        size = SIDE * SIDE
        together.append(update_bytes(name, storage, compute, COUNT, COUNT * size) / (COUNT * size))
        # Of a matrix that is turned as a whole, the plan counts a copy and three squares besides.
        turned = 4 * size * compute.itemsize if facts.turns else 0
        chunks.append((update_bytes(name, storage, compute, 1, size // 4) - turned) / (size // 4))
    most = max(*together, *chunks)
    assert most <= 1.01 * facts.together_bytes, (together, chunks)
    assert most >= 0.9 * facts.together_bytes, (together, chunks)
