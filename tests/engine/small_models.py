"""Random small models and micro-batches for the tests of the engine, and the gradient of plain autograd as their
oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.batches.collate import Batch
from engine.blockwise import Blockwise, Objective
from engine.step import to_micro_batch
from engine.weights import WeightStore
from model.loss import IGNORED, LossSettings
from model.micro_batch import MicroBatch
from model.reference import T5Reference
from model.t5 import T5
from settings.declared import T5ModelConfig

FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5-v1.1": {"tie_word_embeddings": False, "scale_decoder_outputs": False, "feed_forward_proj": "gated-gelu"},
    "umt5": {"bias_in_every_layer": True, "tie_word_embeddings": False},
}
CUTS = {"one": [[0, 1, 2, 3]], "two": [[0, 3], [1, 2]], "four": [[0], [1], [2], [3]], "uneven": [[2], [0, 1, 3]]}
Gradients = tuple[float, dict[str, Tensor]]  # The mean loss, and the gradients by the names of weights.


def small_model(family: str = "t5", seed: int = 1, **changes: Any) -> T5:
    """A T5 of a few thousand weights, fp32."""
    shape = dict(vocab_size=61, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=4)
    return T5(T5ModelConfig(**{**shape, **FAMILIES[family], **changes})).initialise(seed)


def blockwise_of(
    model: T5,
    saved: int = 0,
    store: WeightStore | None = None,
    rate: float = 0.0,
    loss: LossSettings | None = None,
    **more: Any,
) -> Blockwise:
    """A pass in fp32, unless a weight store says otherwise."""
    return Blockwise(model, saved, store or WeightStore(torch.float32), loss or LossSettings(), rate, **more)


class Collected:
    """Stands where the optimizer in backward does: remembers the groups of weights, and leaves their gradients."""

    def __init__(self) -> None:
        self.groups: list[list[nn.Parameter]] = []

    def apply(self, weights: Sequence[nn.Parameter]) -> None:
        self.groups.append(list(weights))

    @property
    def weights(self) -> list[nn.Parameter]:
        return [weight for group in self.groups for weight in group]


class Spoiled(Objective):
    """Cross-entropy with its loss, or the gradient of the hidden states, times a factor."""

    def __init__(self, loss: float = 1.0, gradient: float = 1.0) -> None:
        self.loss_factor = loss
        self.gradient_factor = gradient

    def loss_and_gradients(self, *facts: Any) -> tuple[Tensor, Tensor]:
        loss, gradient = super().loss_and_gradients(*facts)
        return loss * self.loss_factor, gradient * self.gradient_factor


class Rectangle:
    """A padded batch with rows of different length, which can be cut into micro-batches any way.

    Args:
        rows, source, target: B, S, T.
    """

    def __init__(self, rows: int = 4, source: int = 17, target: int = 9, vocab: int = 61, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        self.input_ids = draw(2, vocab, rows, source)
        self.labels = draw(2, vocab, rows, target)
        self.source_lengths = draw(1, source + 1, rows)
        self.target_lengths = draw(1, target + 1, rows)
        self.mask = (torch.arange(source) < self.source_lengths[:, None]).long()
        self.labels[torch.arange(target) >= self.target_lengths[:, None]] = IGNORED
        self.keys = draw(-(2**62), 2**62, rows)

    @property
    def num_labels(self) -> int:
        return int((self.labels != IGNORED).sum())

    def micro_batch(self, model: T5, rows: list[int]) -> MicroBatch:
        """The rows of one micro-batch, as this model attends to them."""
        parts = (self.input_ids, self.source_lengths, self.labels, self.target_lengths, self.keys)
        batch = Batch(*(part[rows].numpy() for part in parts))
        sizes = (int(batch.input_lengths.sum()),), (int(batch.target_lengths.sum()),)
        return to_micro_batch(batch, model.config, model.embedding.device, sizes)

    def micro_batches(self, model: T5, cuts: list[list[int]]) -> list[MicroBatch]:
        return [self.micro_batch(model, rows) for rows in cuts]


def taken_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model, which has none afterwards."""
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return gradients


def pass_gradients(
    blockwise: Blockwise, micro_batches: Sequence[MicroBatch], count: int, update: Any = None
) -> Gradients:
    """Mean loss and gradients of one pass."""
    loss = float(blockwise.gradients(micro_batches, count, update)) / max(1, count)
    return loss, taken_gradients(blockwise.model)


def rectangle_gradients(blockwise: Blockwise, batch: Rectangle, cut: str = "two", update: Any = None) -> Gradients:
    """Mean loss and gradients of one pass over a batch that is cut into micro-batches."""
    micro_batches = batch.micro_batches(blockwise.model, CUTS[cut])
    return pass_gradients(blockwise, micro_batches, batch.num_labels, update)


def reference_gradients(model: T5, batch: Rectangle) -> Gradients:
    """Mean loss and gradients of the plain T5 with this model's weights."""
    reference = T5Reference(model.config)
    reference.load_state_dict(model.state_dict())
    return autograd_gradients(reference, batch)


def autograd_gradients(model: T5 | T5Reference, batch: Rectangle) -> Gradients:
    """Mean loss and gradients by plain autograd over the whole model."""
    loss = model(batch.input_ids, batch.mask, batch.labels)
    loss.backward()
    return loss.item(), taken_gradients(model)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    wide = reference.detach().double()
    return float((value.detach().double() - wide).norm() / wide.norm().clamp(min=1e-30))


def assert_near(ours: Gradients, expected: Gradients, tolerance: float = 1e-5, loss_tolerance: float = 1e-6) -> None:
    """The same loss, and the same gradients of the same weights, but for the order of summation."""
    assert ours[0] == pytest.approx(expected[0], rel=loss_tolerance)
    assert ours[1].keys() == expected[1].keys()
    errors = {name: relative_error(gradient, expected[1][name]) for name, gradient in ours[1].items()}
    assert max(errors.values()) < tolerance, errors
