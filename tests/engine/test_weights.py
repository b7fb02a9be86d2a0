"""Narrow weights are widened in the compute dtype, and stay narrow for products on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from devices.base import CUDA, override_traits
from engine.weights import CastWeightStore, WeightStore, weight_store_for
from model.decoding.generation import generate
from model.layers import as_one
from model.quantization import quantize_model
from model.t5 import T5
from settings.declared import T5ModelConfig

SHAPE = T5ModelConfig(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=64)
PROMPTS = [[5, 6, 7, 1], [9, 1]]


def test_a_gradient_is_formed_in_what_is_computed_in() -> None:
    for weight_store, expected in (
        (CastWeightStore(torch.float32), torch.float32),
        (WeightStore(torch.bfloat16), torch.bfloat16),
    ):
        weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
        buffer = weight_store.open_gradient(weight)
        assert buffer is weight.grad and buffer.dtype == expected and not buffer.any()
        buffer += 1
        assert weight_store.open_gradient(weight) is buffer, "what is there is added to"


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.int8])
def test_int8_and_bf16_stay_narrow_for_products(narrow: torch.dtype) -> None:
    model = T5(SHAPE, dtype=torch.bfloat16).initialise(0)
    if narrow == torch.int8:
        quantize_model(model)
    block = list(model.decoder.blocks[0].parameters())
    head = model.output_weight
    weight_store = weight_store_for(narrow, torch.float32, (head,))
    with weight_store.in_compute_dtype([*block, head]):
        assert head.dtype == torch.float32
        assert (torch.int8 in {weight.dtype for weight in block}) == (narrow == torch.int8), "never widened as a whole"
    with weight_store.for_products([head]):
        assert head.dtype == narrow


def test_answers_are_those_of_the_compute_dtype() -> None:
    model = T5(SHAPE, dtype=torch.bfloat16).initialise(0)
    cast = CastWeightStore(torch.float32)
    options: dict[str, Any] = dict(max_new_tokens=6, min_new_tokens=6, num_beams=3, compute_dtype=torch.float32)
    narrow = generate(model, PROMPTS, with_weights=cast.for_products, **options)
    assert narrow == generate(model, PROMPTS, with_weights=cast.in_compute_dtype, **options)


def test_matrices_below_each_other_are_cast_together_on_a_gpu() -> None:
    """One product serves q, k and v, also where they are stored in another dtype."""
    with override_traits("cpu", CUDA):
        model = T5(SHAPE, dtype=torch.bfloat16).initialise(0)
        attention = model.encoder.blocks[0].attention
        matrices = [attention.q.weight, attention.k.weight, attention.v.weight]
        before = [matrix.data for matrix in matrices]
        with CastWeightStore(torch.float32).in_compute_dtype(model.encoder.blocks[0].parameters()):
            whole = as_one(matrices, 0)
            assert whole is not None and torch.equal(whole, torch.cat(before).float())
    assert all(matrix.data_ptr() == data.data_ptr() for matrix, data in zip(matrices, before, strict=True))
