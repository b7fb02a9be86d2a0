"""Our T5 and the plain one of `model.reference` beside transformers: logits, loss, gradients, answers by family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.attention import position_buckets
from model.decoding.generation import generate
from model.hf_format import load
from model.reference import T5Reference
from model.shapes import hf_names
from model.t5 import T5

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FAMILIES = ("t5", "t5_v1_1", "mt5", "umt5", "byt5")


def compare(model: T5 | T5Reference, expected: dict[str, Tensor]) -> None:
    """Logits, loss and gradients against what transformers said, in fp32."""
    ids, mask, labels = expected["input_ids"], expected["attention_mask"], expected["labels"]
    logits = model.logits(ids, model.shift_right(labels), mask)
    assert (logits - expected["logits"]).abs().max() < 1e-4
    loss = model(ids, mask, labels)
    assert loss.item() == pytest.approx(expected["loss"].item(), rel=1e-4)
    model.zero_grad()
    loss.backward()
    names = hf_names(model.config)
    for name, weight in model.named_parameters():
        reference = expected["grad." + names[name]]
        assert weight.grad is not None and reference.norm() > 0, name
        error = (weight.grad - reference).norm() / reference.norm()
        assert error < 1e-4, f"{name}: {error}"
    assert len(list(model.parameters())) == sum(name.startswith("grad.") for name in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden(family: str) -> None:
    model, expected = load(GOLDEN / family), load_file(GOLDEN / family / "expected.safetensors")
    compare(model, expected)
    reference = T5Reference(model.config).eval()
    reference.load_state_dict(model.state_dict())
    compare(reference, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str) -> None:
    """Token by token: greedy and beam search, with penalties."""
    model, golden = load(GOLDEN / family), json.loads((GOLDEN / family / "generation.json").read_text("utf8"))
    for case in golden["ways"]:
        assert generate(model, golden["rows"], **case["settings"]) == case["answers"], case["settings"]


def test_buckets() -> None:
    distances = torch.arange(-300, 301)
    for name, expected in load_file(GOLDEN / "buckets.safetensors").items():
        count, far, both = map(int, name.split("."))
        assert torch.equal(position_buckets(distances, bool(both), count, far), expected), name
