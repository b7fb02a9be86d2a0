"""Encoders with heads over labels: files, and transformers' classes as the reference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.formats.adapter_folder import read_info
from model.formats.peft import load_adapters, save_adapters
from model.formats.shape_file import published_names, read_config
from model.hf_format import load, save
from model.lora.adapter import add_adapters, use_adapters
from model.lora.form import LoraSettings
from model.t5 import T5
from settings.declared import T5ModelConfig

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_logits_and_gradients_are_those_of_transformers(config: T5ModelConfig, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of(config, kind)
    save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [kind]
    peer = getattr(transformers, kind).from_pretrained(tmp_path).eval()
    labels = labels_of(model)
    if kind == "T5EncoderModel":  # with the head beside it, as the folder has it
        hidden = peer(IDS, attention_mask=MASK).last_hidden_state
        pooled = (hidden * MASK[..., None]).sum(1) / MASK.sum(1, keepdim=True)
        logits = model.label_head.out(model.label_head.dense(pooled).tanh())
        loss = (logits[:, 0] - labels).square().mean()
    else:
        answer = peer(IDS, attention_mask=MASK, labels=labels)
        logits, loss = answer.logits, answer.loss
    ours = model.label_logits(IDS, MASK)
    is_token = MASK.bool() if kind == "T5ForTokenClassification" else torch.ones(2, dtype=torch.bool)
    assert (ours[is_token] - logits[is_token]).abs().max() < 1e-5
    model(IDS, MASK, labels).backward()
    ours_by_name = {
        published_names(model.config)[name]: weight.grad.clone() for name, weight in model.named_parameters()
    }
    model.zero_grad()
    loss.backward()
    for name, weight in peer.named_parameters():
        if name in ours_by_name:
            assert (weight.grad - ours_by_name[name]).abs().max() < 1e-4 * max(1.0, float(weight.grad.abs().max())), (
                name
            )


def adapted(config: T5ModelConfig, kind: str, folder: Path) -> T5:
    """A model with adapters and a head that has learnt, both saved as an adapter over a whole T5."""
    save(T5(dataclasses.replace(config, num_decoder_layers=2)).initialise(1), folder / "base")
    model = load(folder / "base", expect=model_of(config, kind).config, seed=3)
    form = LoraSettings(2, 4.0)
    for adapter in add_adapters(model, form, seed=5).values():
        torch.nn.init.normal_(adapter.b, std=0.3, generator=torch.Generator().manual_seed(6))
    save_adapters(model, form, folder / "adapter", str(folder / "base"), "")
    return model.eval()


@pytest.mark.parametrize("kind", HEADS)
def test_an_adapter_brings_its_head(config: T5ModelConfig, kind: str, tmp_path: Path) -> None:
    model = adapted(config, kind, tmp_path)
    assert all(weight.requires_grad for weight in model.label_head.parameters()) and not model.embedding.requires_grad
    shape = read_info(tmp_path / "adapter").adapted(read_config(tmp_path / "base"))
    assert (shape.head, shape.labels) == (model.config.head, model.config.labels)
    back = load(tmp_path / "base", expect=shape)
    use_adapters(back, *load_adapters(back, tmp_path / "adapter"))
    assert torch.equal(back.label_logits(IDS, MASK), model.label_logits(IDS, MASK))


def test_classes_have_the_order_of_their_numbers(config: T5ModelConfig, tmp_path: Path) -> None:
    save(T5(dataclasses.replace(config, head="token", num_decoder_layers=0, labels="b,c,a")).initialise(1), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    about["id2label"] = {"2": "a", "0": "b", "1": "c"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert read_config(tmp_path).label_names == ("b", "c", "a")
