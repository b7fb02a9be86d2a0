"""Frozen parts get no gradient, what is trained gets that of plain autograd, and backward stops where nothing
learns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.blockwise import Blockwise, Schedule
from engine.weights import WeightStore
from model.lora.freezing import freeze
from model.loss import LossSettings
from settings.errors import UserError
from tests.engine.small_models import Collected, Rectangle, autograd_gradients, relative_error, small_model

CUTS = {"one": [[0, 1, 2, 3]], "uneven": [[2], [0, 1, 3]]}


@pytest.mark.parametrize(
    ("family", "patterns", "cut", "saved"),
    [
        ("t5", "encoder,embedding", "one", 0),
        ("t5", "norms,position_bias", "uneven", 2),
        ("t5", "embedding,encoder,decoder.bias,decoder.blocks.0", "uneven", 99),
        ("umt5", "encoder.block.1,decoder.block.2.layer.1", "uneven", 0),
        ("t5-v1.1", "*.q.weight,shared", "one", 2),
    ],
)
def test_gradients_of_what_is_trained_equal_autograd(family: str, patterns: str, cut: str, saved: int) -> None:
    model, batch = small_model(family), Rectangle()
    trained = freeze(model, patterns)
    loss, expected = autograd_gradients(model, batch)
    blockwise = Blockwise(model, saved, WeightStore(torch.float32), LossSettings(), 0.0)
    collected: Any = Collected()
    total = blockwise.gradients(batch.micro_batches(model, CUTS[cut]), batch.num_labels, collected)
    handed = collected.weights
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert total.item() / batch.num_labels == pytest.approx(loss.item(), rel=1e-6)
    assert set(gradients) == set(expected) == set(trained)
    assert max(relative_error(gradients[name], expected[name]) for name in expected) < 1e-5
    assert {id(w) for w in handed} >= {id(model.get_parameter(name)) for name in trained}
    assert len(handed) == len({id(w) for w in handed}), "each weight is handed over once"


@pytest.mark.parametrize(
    ("patterns", "encoder", "decoder"),
    [
        ("", 0, 0),
        ("encoder,embedding", 3, 0),  # the decoder's bias is in all its blocks
        ("encoder,embedding,position_bias,decoder.blocks.0", 3, 1),
        (
            "embedding,position_bias,encoder.blocks.0,encoder.final_norm",
            1,
            0,
        ),  # the encoder lies below all of the decoder
    ],
)
def test_backward_stops_where_nothing_learns(patterns: str, encoder: int, decoder: int) -> None:
    model = small_model()
    if patterns:
        freeze(model, patterns)
    assert [stack.first_learning for stack in Schedule(model).stacks] == [encoder, decoder]


def test_what_lies_below_checkpoints_no_activations() -> None:
    model, batch = small_model(), Rectangle()
    freeze(model, "encoder,embedding,position_bias,decoder.blocks.0")
    blockwise = Blockwise(model, 99, WeightStore(torch.float32), LossSettings(), 0.0)
    backwards: list[int] = []
    for index, block in enumerate([*model.encoder.blocks, *model.decoder.blocks]):
        block.register_forward_hook(
            lambda *_, index=index: backwards.append(index) if torch.is_grad_enabled() else None
        )
    blockwise.gradients(batch.micro_batches(model, CUTS["uneven"]), batch.num_labels)
    assert backwards == [3, 3, 4, 4], "two micro-batches through the two decoder blocks that learn"


def test_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(UserError) as caught:
        freeze(small_model(), "encoder, enc, *.z.weight")
    assert len(caught.value.problems) == 2
    assert "--freeze = enc, names no weight" in str(caught.value)
    assert "embedding, encoder, decoder" in str(caught.value) and "norms" in str(caught.value)
