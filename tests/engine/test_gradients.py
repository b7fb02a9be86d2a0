"""A pass forms the gradients of the plain T5 of `model.reference`, whatever the micro-batches, the saved blocks, the
dtype at rest, what is frozen, and how rows lie.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.batches.collate import Row, collate
from devices.kernels import calls
from engine.blockwise import Schedule
from engine.step import to_micro_batch
from engine.weights import weight_store_for
from model.lora.freezing import freeze
from model.loss import LossSettings
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from tests.engine.small_models import (
    CUTS,
    Collected,
    Rectangle,
    assert_near,
    autograd_gradients,
    blockwise_of,
    pass_gradients,
    rectangle_gradients,
    reference_gradients,
    small_model,
)

CPU = torch.device("cpu")
CAST = weight_store_for(torch.bfloat16, torch.float32)


@pytest.mark.parametrize("has_kernels", [True, False], ids=["end to end", "side by side"])
@pytest.mark.parametrize(
    ("family", "cut", "saved", "d_kv"),
    [("t5", "two", 99, 16), ("t5-v1.1", "uneven", 2, 16), ("umt5", "four", 0, 8)],
)
def test_gradients_equal_the_plain_model(family: str, cut: str, saved: int, d_kv: int, has_kernels: bool) -> None:
    calls.use(has_kernels)
    model = small_model(family, d_kv=d_kv)
    batch = Rectangle()
    collected = Collected()
    expected = reference_gradients(model, batch)
    assert_near(rectangle_gradients(blockwise_of(model, saved), batch, cut, collected), expected)
    handed = {id(weight) for weight in collected.weights}
    assert len(collected.weights) == len(handed) == len(expected[1]), "each weight is handed over once"


@pytest.mark.parametrize(
    ("compiled", "family"), [(True, "t5"), (False, "t5"), (False, "t5-v1.1")], indirect=["compiled"]
)
def test_dropout_is_drawn_again_where_a_block_is_recomputed(compiled: bool, family: str) -> None:
    model = small_model(family, d_kv=16)
    batch = Rectangle()
    expected = rectangle_gradients(blockwise_of(model, 99, rate=0.3), batch)
    torch.rand(3)  # Something else draws in between.
    assert_near(rectangle_gradients(blockwise_of(model, 0, rate=0.3), batch), expected)
    if compiled:
        assert_near(rectangle_gradients(blockwise_of(model, 99, rate=0.3), batch, "uneven"), expected)
    plain, _ = rectangle_gradients(blockwise_of(model, 99), batch)
    assert expected[0] != pytest.approx(plain, rel=1e-3), "dropout must do something"


def test_weights_at_rest_in_bf16_compute_as_their_fp32_copies() -> None:
    at_rest = T5(small_model("umt5").config, dtype=torch.bfloat16).initialise(1)
    copy = small_model("umt5")
    copy.load_state_dict(at_rest.state_dict())
    loss, expected = rectangle_gradients(blockwise_of(copy), Rectangle())
    ours, gradients = rectangle_gradients(blockwise_of(at_rest, 0, CAST), Rectangle())
    assert ours == loss and all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert at_rest.embedding.dtype == torch.bfloat16, "the wider copy must not stay"


def test_evaluation_loss_is_that_of_the_model() -> None:
    model = small_model()
    batch = Rectangle()
    blockwise = blockwise_of(model, rate=0.5, loss=LossSettings(label_smoothing=0.1))
    total = blockwise.loss(batch.micro_batches(model, CUTS["uneven"]))
    expected = model(batch.input_ids, batch.mask, batch.labels)
    assert float(total) / batch.num_labels == pytest.approx(expected.item(), rel=1e-6)


# --- what is frozen, and the order of weights


@pytest.mark.parametrize(
    ("family", "patterns", "saved", "first"),
    [
        ("t5", "encoder,embedding,position_bias,decoder.blocks.0", 99, [3, 1]),
        # The encoder lies below all of the decoder.
        ("t5", "embedding,position_bias,encoder.blocks.0,encoder.final_norm", 0, [1, 0]),
        ("t5-v1.1", "*.q.weight,shared", 2, [0, 0]),
    ],
)
def test_what_is_trained_has_the_gradients_of_autograd_and_backward_stops_below(
    family: str, patterns: str, saved: int, first: list[int]
) -> None:
    model = small_model(family)
    trained = freeze(model, patterns)
    assert [stack.backward_start for stack in Schedule(model).stacks] == first
    collected = Collected()
    ours = rectangle_gradients(blockwise_of(model, saved), Rectangle(), "uneven", collected)
    assert_near(ours, autograd_gradients(model, Rectangle()))
    assert set(ours[1]) == set(trained)
    # Backward completes the weights in the order that is known before the pass: the same on all processes.
    groups = [[id(weight) for weight in group] for group in Schedule(model).backward()]
    assert [[id(weight) for weight in group] for group in collected.groups] == groups


def test_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(UserError) as caught:
        freeze(small_model(), "encoder, enc, *.z.weight")
    assert len(caught.value.problems) == 2
    assert "--freeze = enc, names no weight" in str(caught.value)
    assert "embedding, encoder, decoder" in str(caught.value) and "norms" in str(caught.value)


# --- fillers


def test_filled_up_rows_give_the_same_loss_and_gradients() -> None:
    draw = np.random.default_rng(5)
    rows = [Row(draw.integers(2, 61, 3 + 9 * n), draw.integers(2, 61, 20 - 7 * n), n) for n in range(3)]
    batch = collate(rows, 0)
    exact = (int(batch.input_lengths.sum()),), (int(batch.target_lengths.sum()),)
    plain, filled = (to_micro_batch(batch, T5ModelConfig(), CPU, sizes) for sizes in (exact, ((), ())))
    assert plain.input_ids.shape != filled.input_ids.shape and plain.num_labels == filled.num_labels
    blockwise = blockwise_of(small_model(), 0, rate=0.3)
    expected = pass_gradients(blockwise, [plain], plain.num_labels)
    assert_near(pass_gradients(blockwise, [filled], filled.num_labels), expected)
