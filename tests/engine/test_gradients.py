"""A pass forms the gradients of the plain T5 of `model.reference`, whatever the micro-batches, the saved blocks, the
dtype at rest, what is frozen, and how rows lie.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from data.batches.collate import Row, collate
from devices.kernels import calls
from devices.malloc import HeapTrimmer
from engine.blockwise import CheckpointedBlock, Schedule
from engine.step import to_micro_batch
from engine.weights import WeightStore, weight_store_for
from model.lora.freezing import freeze
from model.loss import IGNORED, LossSettings
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from tests.engine.small_models import (
    CUTS,
    FAMILIES,
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


class Recording(WeightStore):
    """Remembers what was asked for, and what was expected next."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.used: list[list[int]] = []
        self.expected: list[list[int]] = []

    @contextmanager
    def in_compute_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        self.used.append([id(weight) for weight in weights])
        yield

    def expect(self, weights: Iterable[nn.Parameter], upcoming: Any) -> None:
        self.expected.append([id(weight) for weight in upcoming[0]] if upcoming else [])


@pytest.mark.parametrize("has_kernels", [True, False], ids=["end to end", "side by side"])
@pytest.mark.parametrize(
    ("family", "cut", "saved", "d_kv"),
    [("t5", "two", 0, 16), ("t5-v1.1", "uneven", 2, 16), ("umt5", "four", 0, 8), ("t5", "one", 99, 16)],
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


@settings(max_examples=8, deadline=None, derandomize=True)
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
    model = small_model(family, seed, **changes)
    batch = Rectangle(*lengths, seed=seed)
    _, expected = reference_gradients(model, batch)
    rows = list(range(lengths[0]))
    cuts = [rows[first : first + per_micro_batch] for first in range(0, len(rows), per_micro_batch)]
    _, gradients = pass_gradients(blockwise_of(model, saved), batch.micro_batches(model, cuts), batch.num_labels)
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():  # A gradient that cancels to nothing has no relative error worth the name.
        assert float((gradients[name] - gradient).norm()) < 1e-5 * max(float(gradient.norm()), 1e-3 * largest), name


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


@pytest.mark.parametrize(("family", "saved"), [("t5", 0), ("umt5", 99)])
def test_weights_at_rest_in_bf16_compute_as_their_fp32_copies(family: str, saved: int) -> None:
    at_rest = T5(small_model(family).config, dtype=torch.bfloat16).initialise(1)
    copy = small_model(family)
    copy.load_state_dict(at_rest.state_dict())
    loss, expected = rectangle_gradients(blockwise_of(copy, saved), Rectangle())
    ours, gradients = rectangle_gradients(blockwise_of(at_rest, saved, CAST), Rectangle())
    assert ours == loss and all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert at_rest.embedding.dtype == torch.bfloat16, "the wider copy must not stay"


def test_activations_between_blocks_may_be_narrower() -> None:
    narrow = [
        rectangle_gradients(
            blockwise_of(small_model().bfloat16(), saved, CAST, 0.2, between_blocks_dtype=torch.bfloat16), Rectangle()
        )
        for saved in (0, 2)
    ]
    assert_near(narrow[0], narrow[1], loss_tolerance=0.0)


def test_a_saved_block_does_not_hold_its_output() -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []

    def doubled(x: torch.Tensor, *, graph_only: bool = False) -> torch.Tensor:
        y = 2.0 * x
        outputs.append(weakref.ref(y))
        return y

    block = CheckpointedBlock(
        doubled, torch.ones(3), is_saved=True, dtype=torch.float32, needs_input=True, heap=HeapTrimmer("small")
    )
    block.forward()
    assert outputs[0]() is None
    gradient = block.backward(torch.full((3,), 5.0))
    assert gradient is not None and gradient.tolist() == [10.0] * 3


def test_evaluation_loss_is_that_of_the_model() -> None:
    model = small_model()
    batch = Rectangle()
    blockwise = blockwise_of(model, rate=0.5, loss=LossSettings(label_smoothing=0.1))
    total = blockwise.loss(batch.micro_batches(model, CUTS["uneven"]))
    expected = model(batch.input_ids, batch.mask, batch.labels)
    assert float(total) / batch.num_labels == pytest.approx(expected.item(), rel=1e-6)


# --- what is frozen, and the order of weights


@pytest.mark.parametrize(
    ("family", "patterns", "cut", "saved", "first"),
    [
        ("t5", "", "one", 0, [0, 0]),
        ("t5", "encoder,embedding", "one", 0, [3, 0]),  # The decoder's bias is in all its blocks.
        ("t5", "encoder,embedding,position_bias,decoder.blocks.0", "uneven", 99, [3, 1]),
        # The encoder lies below all of the decoder.
        ("t5", "embedding,position_bias,encoder.blocks.0,encoder.final_norm", "one", 0, [1, 0]),
        ("t5", "norms,position_bias", "uneven", 2, [0, 0]),
        ("t5", "embedding,encoder,decoder.bias,decoder.blocks.0", "uneven", 99, [3, 1]),
        ("umt5", "encoder.block.1,decoder.block.2.layer.1", "uneven", 0, [0, 0]),
        ("t5-v1.1", "*.q.weight,shared", "one", 2, [0, 0]),
    ],
)
def test_what_is_trained_has_the_gradients_of_autograd_and_backward_stops_below(
    family: str, patterns: str, cut: str, saved: int, first: list[int]
) -> None:
    model = small_model(family)
    trained = freeze(model, patterns) if patterns else dict(model.named_parameters())
    assert [stack.first_learning for stack in Schedule(model).stacks] == first
    store = Recording()
    collected = Collected()
    blockwise = blockwise_of(model, saved, store)
    blockwise.loss(Rectangle().micro_batches(model, CUTS[cut]))
    forward = list(store.used)
    store.used.clear()
    store.expected.clear()
    ours = rectangle_gradients(blockwise, Rectangle(), cut, collected)
    assert_near(ours, autograd_gradients(model, Rectangle()))
    assert set(ours[1]) == set(trained)
    # Backward completes the weights in the order that is known before the pass: the same on all processes.
    groups = [[id(weight) for weight in group] for group in Schedule(model).backward()]
    assert [[id(weight) for weight in group] for group in collected.groups] == groups
    assert store.used == [*forward, *groups[:-1]], "evaluation loads weights as training does"
    blocks = [*forward[:-1], *groups[:-1]]
    assert store.expected == [*blocks[1:], groups[-1]], "each block is expected while the one before it computes"


def test_what_lies_below_checkpoints_no_activations() -> None:
    model = small_model()
    freeze(model, "encoder,embedding,position_bias,decoder.blocks.0")
    with_graph: list[int] = []
    for index, block in enumerate([*model.encoder.blocks, *model.decoder.blocks]):
        block.register_forward_hook(
            lambda *_, index=index: with_graph.append(index) if torch.is_grad_enabled() else None
        )
    rectangle_gradients(blockwise_of(model, 99), Rectangle())
    assert with_graph == [3, 3, 4, 4], "two micro-batches through the two decoder blocks that learn"


def test_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(UserError) as caught:
        freeze(small_model(), "encoder, enc, *.z.weight")
    assert len(caught.value.problems) == 2
    assert "--freeze = enc, names no weight" in str(caught.value)
    assert "embedding, encoder, decoder" in str(caught.value) and "norms" in str(caught.value)


# --- fillers


@pytest.mark.parametrize(("family", "saved"), [("t5", 0), ("umt5", 9)])
def test_filled_up_rows_give_the_same_loss_and_gradients(family: str, saved: int) -> None:
    draw = np.random.default_rng(5)
    rows = [Row(draw.integers(2, 61, 3 + 9 * n), draw.integers(2, 61, 20 - 7 * n), n) for n in range(3)]
    batch = collate(rows, 0)
    exact = (int(batch.input_lengths.sum()),), (int(batch.target_lengths.sum()),)
    plain, filled = (to_micro_batch(batch, T5ModelConfig(), CPU, sizes) for sizes in (exact, ((), ())))
    assert plain.input_ids.shape != filled.input_ids.shape and plain.num_labels == filled.num_labels
    blockwise = blockwise_of(small_model(family), saved, rate=0.3)
    expected = pass_gradients(blockwise, [plain], plain.num_labels)
    assert_near(pass_gradients(blockwise, [filled], filled.num_labels), expected)


def test_fillers_belong_to_no_row_and_no_label_judges_them() -> None:
    rows = [Row(np.arange(2, 10), np.arange(2, 7), 5), Row(np.arange(2, 10), np.arange(2, 9), 6)]
    micro_batch = to_micro_batch(collate(rows, 0), T5ModelConfig(), CPU, ((24,), (13, 20)))
    assert micro_batch.source.lengths == (8, 8) and micro_batch.target.lengths == (5, 7)
    assert (micro_batch.source.filler, micro_batch.target.filler) == (8, 1)
    assert len(micro_batch.input_ids) == micro_batch.source.num_tokens == 24 and len(micro_batch.labels) == 13
    assert (micro_batch.labels[12:] == IGNORED).all() and (micro_batch.input_ids[16:] == 0).all()
    assert micro_batch.num_labels == 12
