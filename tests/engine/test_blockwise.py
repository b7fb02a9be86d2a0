"""A pass forms the gradients of the plain T5 of `model.reference`, whatever the micro-batches, the saved blocks and the
dtype at rest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blockwise import Blockwise
from engine.weights import WeightStore, weight_store_for
from model.loss import LossSettings
from model.t5 import T5
from tests.engine.small_models import FAMILIES, Collected, Rectangle, reference_gradients, relative_error, small_model

CUTS = {"one": [[0, 1, 2, 3]], "two": [[0, 3], [1, 2]], "four": [[0], [1], [2], [3]], "uneven": [[2], [0, 1, 3]]}


def walk_gradients(model: T5, batch: Rectangle, cuts: list[list[int]], saved: int, rate: float = 0.0, **kwargs: object):
    blockwise = Blockwise(model, saved, kwargs.get("weight_store", WeightStore(torch.float32)), LossSettings(), rate)  # type: ignore[arg-type]
    collected: Any = Collected()
    total = blockwise.gradients(batch.micro_batches(model, cuts), batch.num_labels, collected)
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return total / batch.num_labels, gradients, collected.weights


@pytest.mark.parametrize(
    ("family", "cut", "saved"), [("t5", "two", 0), ("t5-v1.1", "uneven", 2), ("umt5", "four", 0), ("t5", "one", 99)]
)
def test_gradients_equal_the_plain_model(family: str, cut: str, saved: int) -> None:
    model, batch = small_model(family), Rectangle()
    loss, expected = reference_gradients(model, batch)
    ours, gradients, order = walk_gradients(model, batch, CUTS[cut], saved)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    assert gradients.keys() == expected.keys()
    assert max(relative_error(gradients[name], expected[name]) for name in expected) < 1e-5
    assert len(order) == len({id(weight) for weight in order}) == len(expected), "each weight is handed over once"


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    shape=st.tuples(*(st.integers(1, 4) for _ in range(3)), st.integers(1, 9)),
    lengths=st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 20)),
    saved=st.integers(0, 9),
    per_micro_batch=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_gradients_equal_the_plain_model_on_random_models(family, shape, lengths, saved, per_micro_batch, seed) -> None:
    heads, layers, decoder_layers, d_kv = shape
    changes = {"num_heads": heads, "num_layers": layers, "num_decoder_layers": decoder_layers, "d_kv": d_kv}
    model, batch = small_model(family, seed, **changes), Rectangle(*lengths, seed=seed)
    _, expected = reference_gradients(model, batch)
    rows = list(range(lengths[0]))
    cuts = [rows[at : at + per_micro_batch] for at in range(0, len(rows), per_micro_batch)]
    _, gradients, _ = walk_gradients(model, batch, cuts, saved)
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():  # a gradient that cancels to nothing has no relative error worth the name
        assert float((gradients[name] - gradient).norm()) < 1e-5 * max(float(gradient.norm()), 1e-3 * largest), name


@pytest.mark.parametrize(
    ("compiled", "family"), [(True, "t5"), (False, "t5"), (False, "t5-v1.1")], indirect=["compiled"]
)
def test_dropout_is_drawn_again_where_a_block_is_recomputed(compiled: bool, family: str) -> None:
    model, batch = small_model(family, d_kv=16), Rectangle()
    loss, expected, _ = walk_gradients(model, batch, CUTS["two"], 99, rate=0.3)
    torch.rand(3)  # whatever else draws
    ours, gradients, _ = walk_gradients(model, batch, CUTS["two"], 0, rate=0.3)
    plain, _, _ = walk_gradients(model, batch, CUTS["two"], 99)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    assert loss.item() != pytest.approx(plain.item(), rel=1e-3), "dropout must do something"
    assert max(relative_error(gradients[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.parametrize("compiled", [True], indirect=True)
def test_compiled_dropout_does_not_depend_on_micro_batches(compiled: bool) -> None:
    model, batch = small_model(d_kv=16), Rectangle()
    loss, expected, _ = walk_gradients(model, batch, CUTS["one"], 99, rate=0.3)
    ours, gradients, _ = walk_gradients(model, batch, CUTS["uneven"], 99, rate=0.3)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    assert max(relative_error(gradients[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.parametrize(("family", "saved"), [("t5", 0), ("umt5", 99)])
def test_weights_at_rest_in_bf16_compute_as_their_fp32_copies(family: str, saved: int) -> None:
    batch = Rectangle()
    at_rest = T5(small_model(family).config, dtype=torch.bfloat16).initialise(1)
    copy = small_model(family)
    copy.load_state_dict(at_rest.state_dict())
    weight_store = weight_store_for(torch.bfloat16, torch.float32)
    loss, expected, _ = walk_gradients(copy, batch, CUTS["two"], saved)
    ours, gradients, _ = walk_gradients(at_rest, batch, CUTS["two"], saved, weight_store=weight_store)
    assert ours.item() == loss.item()
    for name in expected:
        assert torch.equal(gradients[name], expected[name]), name
    assert at_rest.embedding.dtype == torch.bfloat16, "the wider copy must not stay"


def test_evaluation_loss_is_that_of_the_model() -> None:
    model, batch = small_model(), Rectangle()
    blockwise = Blockwise(model, 0, WeightStore(torch.float32), LossSettings(label_smoothing=0.1), 0.5)
    total = blockwise.loss(batch.micro_batches(model, CUTS["uneven"]))
    expected = model(batch.input_ids, batch.mask, batch.labels)
    assert float(total) / batch.num_labels == pytest.approx(expected.item(), rel=1e-6)
