"""Narrow weights are widened for a visit, and left as they are for a glance on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from config import T5ModelConfig
from engine.residency import CastOnVisit, Residency, residency_for
from model.generation import generate
from model.quantization import quantize_model
from model.t5 import T5

SHAPE = T5ModelConfig(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=64)
PROMPTS = [[5, 6, 7, 1], [9, 1]]


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2, dtype=dtype)), nn.Parameter(torch.ones(2))]  # a matrix, and a norm in fp32


def test_a_visit_widens_and_a_glance_does_not() -> None:
    narrow, cast = weights(torch.bfloat16), CastOnVisit(torch.float32)
    with cast.visit(narrow):
        assert narrow[0].dtype == torch.float32
    with cast.glance(narrow):
        assert narrow[0].dtype == torch.bfloat16
    assert narrow[0].dtype == torch.bfloat16


def test_what_no_product_widens_is_visited() -> None:
    wide, half = weights(torch.float32), CastOnVisit(torch.float16)
    with half.glance(wide):  # fp32 weights in fp16 products
        assert wide[0].dtype == torch.float16
    elsewhere = [nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16, device="meta"))]
    with CastOnVisit(torch.float32).glance(elsewhere):
        assert elsewhere[0].dtype == torch.float32
    with Residency(torch.float32).glance(wide):
        assert wide[0].dtype == torch.float32


def test_a_gradient_is_formed_in_what_is_computed_in() -> None:
    for residency, expected in (
        (CastOnVisit(torch.float32), torch.float32),
        (Residency(torch.bfloat16), torch.bfloat16),
    ):
        weight = weights(torch.bfloat16)[0]
        buffer = residency.open_gradient(weight)
        assert buffer is weight.grad and buffer.dtype == expected and not buffer.any()
        buffer += 1
        assert residency.open_gradient(weight) is buffer, "what is there is added to"


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.int8])
def test_int8_and_bf16_are_left_narrow_at_a_glance(narrow: torch.dtype) -> None:
    model = T5(SHAPE, dtype=torch.bfloat16).initialise(0)
    if narrow == torch.int8:
        quantize_model(model)
    head = model.output_weight
    residency = residency_for(narrow, torch.float32, (head,))
    with residency.visit([head]):
        assert head.dtype == torch.float32
    with residency.glance([head]):
        assert head.dtype == narrow


@pytest.mark.parametrize("beams", [1, 3])
def test_answers_are_those_of_the_visit(beams: int) -> None:
    model, cast = T5(SHAPE, dtype=torch.bfloat16).initialise(0), CastOnVisit(torch.float32)
    how = {"max_new_tokens": 12, "min_new_tokens": 12, "num_beams": beams, "compute_dtype": torch.float32}
    assert generate(model, PROMPTS, visit=cast.glance, **how) == generate(model, PROMPTS, visit=cast.visit, **how)  # type: ignore[arg-type]
