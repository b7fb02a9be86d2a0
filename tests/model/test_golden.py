"""Our T5 and the plain one of `model.reference` beside transformers: logits, loss, gradients, greedy answers of each
family.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.attention import position_buckets
from model.decoding.generation import generate
from model.hf_format import load, save
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


def compare_greedy(model: T5, expected: dict[str, Tensor]) -> None:
    lengths = expected["attention_mask"].sum(1).tolist()
    rows = [row[:length] for row, length in zip(expected["input_ids"].tolist(), lengths, strict=True)]
    answers = [row[1:] for row in expected["greedy"].tolist()]
    answers = [row[: row.index(1)] if 1 in row else row for row in answers]
    assert generate(model, rows, max_new_tokens=expected["greedy"].shape[1] - 1) == answers


@pytest.mark.parametrize("family", FAMILIES)
def test_golden(family: str) -> None:
    model, expected = load(GOLDEN / family), load_file(GOLDEN / family / "expected.safetensors")
    compare(model, expected)
    compare_greedy(model, expected)
    reference = T5Reference(model.config).eval()
    reference.load_state_dict(model.state_dict())
    compare(reference, expected)


def test_buckets() -> None:
    distances = torch.arange(-300, 301)
    for name, expected in load_file(GOLDEN / "buckets.safetensors").items():
        count, far, both = map(int, name.split("."))
        assert torch.equal(position_buckets(distances, bool(both), count, far), expected), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_against_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.golden import make_golden

    peer = make_golden.build(family, seed=12345)
    expected = make_golden.reference(peer, make_golden.inputs(peer.config.vocab_size, 12345))
    peer.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    compare(ours, expected)
    compare_greedy(ours, expected)

    save(ours, tmp_path / "ours")
    back = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    batch = {name: expected[name] for name in ("input_ids", "attention_mask", "labels")}
    assert torch.equal(back(**batch).logits, peer(**batch).logits)
    state, theirs_stored = back.state_dict(), peer.state_dict()
    assert all(torch.equal(state[name], theirs_stored[name]) for name in theirs_stored)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_folder_loads_in_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = load(GOLDEN / family, dtype=torch.bfloat16)
    save(ours, tmp_path)
    peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert peer.dtype == torch.bfloat16
    assert torch.equal(peer.get_input_embeddings().weight, ours.embedding)
