"""Encoders with heads over labels: files, and transformers' classes as the reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from config import T5ModelConfig
from model.formats.shape_file import published_names, read_config
from model.hf_format import load, save
from model.t5 import T5
from settings.consistency import TEXT

HEADS: dict[str, dict[str, Any]] = {  # class of transformers -> the head that it is
    "T5EncoderModel": {"head": "sequence", "labels": "regression", "num_decoder_layers": 0},
    "T5ForTokenClassification": {"head": "token", "labels": "H,E,C", "num_decoder_layers": 0},
    "T5ForSequenceClassification": {"head": "sequence", "labels": "4", "num_decoder_layers": 2},
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 1], [7, 5, 9, 1, 0, 0]])
MASK = (IDS != 0).long()


def model_of(config: T5ModelConfig, kind: str) -> T5:
    shape = dataclasses.replace(config, tie_word_embeddings=True, scale_decoder_outputs=True, **HEADS[kind])
    return T5(shape).initialise(3).eval()


def labels_of(model: T5) -> Tensor:
    if model.config.head == "token":
        return torch.tensor([[0, 1, 2, 1, -100, -100], [2, 2, -100, -100, -100, -100]])
    return torch.tensor([0.5, -2.0]) if model.config.labels == "regression" else torch.tensor([1, 3])


@pytest.mark.parametrize("kind", HEADS)
def test_round_trip(config: T5ModelConfig, kind: str, tmp_path: Path) -> None:
    model = model_of(config, kind)
    save(model, tmp_path)
    back = read_config(tmp_path)
    assert (back.head, back.label_names, back.num_decoder_layers) == (
        model.config.head, model.config.label_names, model.config.num_decoder_layers,
    )  # fmt: skip
    assert torch.equal(load(tmp_path).label_logits(IDS, MASK), model.label_logits(IDS, MASK))


def test_an_encoder_is_taken_from_a_whole_t5_and_gets_a_new_head(config: T5ModelConfig, tmp_path: Path) -> None:
    whole = T5(dataclasses.replace(config, tie_word_embeddings=False)).initialise(1)
    assert whole.config.head == TEXT
    save(whole, tmp_path)
    encoder = load(tmp_path, expect=model_of(config, "T5EncoderModel").config, seed=3)
    assert torch.equal(encoder.encoder.final_norm.weight, whole.encoder.final_norm.weight)
    assert torch.equal(encoder.label_head.out.weight, model_of(config, "T5EncoderModel").label_head.out.weight)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_logits_and_gradients_are_those_of_transformers(config: T5ModelConfig, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of(config, kind)
    save(model, tmp_path)
    theirs = getattr(transformers, kind).from_pretrained(tmp_path).eval()
    labels = labels_of(model)
    if kind == "T5EncoderModel":  # with the head beside it, as the folder has it
        hidden = theirs(IDS, attention_mask=MASK).last_hidden_state
        pooled = (hidden * MASK[..., None]).sum(1) / MASK.sum(1, keepdim=True)
        logits = model.label_head.out(model.label_head.dense(pooled).tanh())
        loss = (logits[:, 0] - labels).square().mean()
    else:
        answer = theirs(IDS, attention_mask=MASK, labels=labels)
        logits, loss = answer.logits, answer.loss
    ours = model.label_logits(IDS, MASK)
    seen = MASK.bool() if kind == "T5ForTokenClassification" else torch.ones(2, dtype=torch.bool)
    assert (ours[seen] - logits[seen]).abs().max() < 1e-5
    model(IDS, MASK, labels).backward()
    ours_by_name = {
        published_names(model.config)[name]: weight.grad.clone() for name, weight in model.named_parameters()
    }
    model.zero_grad()
    loss.backward()
    for name, weight in theirs.named_parameters():
        if name in ours_by_name:
            assert (weight.grad - ours_by_name[name]).abs().max() < 1e-4 * max(1.0, float(weight.grad.abs().max())), (
                name
            )
