"""Encoders with heads over labels: files, and transformers' classes as the reference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.formats.adapter_folder import read_info
from model.formats.peft import load_adapters, save_adapters
from model.formats.shape_file import published_names, read_config
from model.hf_format import load, save
from model.lora.adapter import add_adapters, use_adapters
from model.lora.form import LoraSettings
from model.rows import Rows
from model.t5 import T5
from settings.consistency import TEXT
from settings.declared import T5ModelConfig
from settings.errors import UserError
from tests.measuring import in_child

HEADS: dict[str, dict[str, Any]] = {  # class of transformers -> the head that it is
    "T5EncoderModel": {"head": "sequence", "labels": "regression", "num_decoder_layers": 0},
    "T5ForTokenClassification": {"head": "token", "labels": "H,E,C", "num_decoder_layers": 0},
    "T5ForSequenceClassification": {"head": "sequence", "labels": "4", "num_decoder_layers": 2},
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 1], [7, 5, 9, 1, 0, 0]])
MASK = (IDS != 0).long()
NEW_HEAD = """
from dataclasses import replace
from model.formats.shape_file import read_config
from model.hf_format import load
load(sys.argv[1], torch.int8, expect=replace(read_config(sys.argv[1]), head="token", labels="3"))
print(int("sympy" in sys.modules))
"""


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
        model.config.head,
        model.config.label_names,
        model.config.num_decoder_layers,
    )
    assert torch.equal(load(tmp_path).label_logits(IDS, MASK), model.label_logits(IDS, MASK))


def test_an_encoder_is_taken_from_a_whole_t5_and_gets_a_new_head(config: T5ModelConfig, tmp_path: Path) -> None:
    whole = T5(dataclasses.replace(config, tie_word_embeddings=False)).initialise(1)
    assert whole.config.head == TEXT
    save(whole, tmp_path)
    encoder = load(tmp_path, expect=model_of(config, "T5EncoderModel").config, seed=3)
    assert torch.equal(encoder.encoder.final_norm.weight, whole.encoder.final_norm.weight)
    assert torch.equal(encoder.label_head.out.weight, model_of(config, "T5EncoderModel").label_head.out.weight)


@pytest.mark.parametrize(
    ("saved_labels", "labels", "is_kept"), [("a,b,c", "a,b,c", True), ("3", "a,b,c", True), ("a,b,c", "c,b,a", False)]
)
def test_a_head_is_kept_for_its_own_labels(
    config: T5ModelConfig, saved_labels: str, labels: str, is_kept: bool, tmp_path: Path
) -> None:
    shape = dataclasses.replace(config, head="token", num_decoder_layers=0, labels=saved_labels)
    model = T5(shape).initialise(1)
    save(model, tmp_path)
    back = load(tmp_path, expect=dataclasses.replace(shape, labels=labels), seed=3)
    assert torch.equal(back.label_head.out.weight, model.label_head.out.weight) == is_kept


def test_a_new_head_over_a_quantized_base_imports_no_sympy(config: T5ModelConfig, tmp_path: Path) -> None:
    save(T5(dataclasses.replace(config, head="none", num_decoder_layers=0)).initialise(1), tmp_path)
    assert in_child(NEW_HEAD, tmp_path) == [0], "it takes 35 MB"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["T5", "UMT5"])
@pytest.mark.parametrize("kind", HEADS)
def test_logits_and_gradients_are_those_of_transformers(
    config: T5ModelConfig, kind: str, family: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of(dataclasses.replace(config, bias_in_every_layer=family == "UMT5"), kind)
    save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [kind.replace("T5", family)]
    peer = getattr(transformers, kind.replace("T5", family)).from_pretrained(tmp_path).eval()
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


@pytest.mark.parametrize("head", ["{", "[]", '{"head": "other"}'])
def test_a_damaged_head_of_an_adapter_is_refused(config: T5ModelConfig, head: str, tmp_path: Path) -> None:
    adapted(config, "T5ForTokenClassification", tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file), file, {"head": head})
    with pytest.raises(UserError, match="head"):
        read_info(tmp_path / "adapter")


def test_classes_have_the_order_of_their_numbers(config: T5ModelConfig, tmp_path: Path) -> None:
    save(T5(dataclasses.replace(config, head="token", num_decoder_layers=0, labels="b,c,a")).initialise(1), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    about["id2label"] = {"2": "a", "0": "b", "1": "c"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert read_config(tmp_path).label_names == ("b", "c", "a")


def test_an_adapter_of_peft_has_the_label_names_of_its_base(config: T5ModelConfig, tmp_path: Path) -> None:
    shape = dataclasses.replace(config, head="token", num_decoder_layers=0, labels="H,E,C")
    model = T5(shape).initialise(1)
    save(model, tmp_path / "base")
    form = LoraSettings(2, 4.0)
    add_adapters(model, form, seed=5)
    save_adapters(model, form, tmp_path / "adapter", str(tmp_path / "base"), "")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file), file)  # PEFT's files have no metadata: the task and the tensors say what there is
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["task_type"] == "TOKEN_CLS"
    base, info = read_config(tmp_path / "base"), read_info(tmp_path / "adapter")
    assert info.adapted(base).label_names == ("H", "E", "C")
    assert info.adapted(dataclasses.replace(base, labels="a,b")).label_names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem_type": "multi_label_classification"}, "problem_type = multi_label_classification"),
        ({"problem_type": "regression"}, "problem_type = regression, predicts 4 numbers"),
    ],
)
def test_several_labels_per_text_are_refused(
    config: T5ModelConfig, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(model_of(config, "T5ForSequenceClassification"), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(UserError, match=words):
        read_config(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HEADS)
def test_peft_computes_the_same(config: T5ModelConfig, kind: str, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = adapted(config, kind, tmp_path)
    base = getattr(transformers, kind).from_pretrained(tmp_path / "base", num_labels=max(2, model.config.num_labels))
    peer = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        answer = peer(input_ids=IDS, attention_mask=MASK)
        if kind == "T5EncoderModel":
            rows = Rows((6, 4))
            hidden = model.encode(rows.flatten(IDS), rows)
            assert (rows.flatten(answer.last_hidden_state) - hidden).abs().max() < 1e-5
            return
        is_token = MASK.bool() if kind == "T5ForTokenClassification" else torch.ones(2, dtype=torch.bool)
        assert (answer.logits[is_token] - model.label_logits(IDS, MASK)[is_token]).abs().max() < 1e-5
    peer.save_pretrained(tmp_path / "back")
    back = load(tmp_path / "base", expect=model.config)
    use_adapters(back, *load_adapters(back, tmp_path / "back"))
    assert torch.equal(back.label_logits(IDS, MASK), model.label_logits(IDS, MASK))
    assert read_info(tmp_path / "back").head["head"] == model.config.head


def test_a_half_precision_encoder_of_older_transformers_is_read(config: T5ModelConfig, tmp_path: Path) -> None:
    shape = dataclasses.replace(config, head="none", num_decoder_layers=0)
    model = T5(shape, dtype=torch.float16).initialise(1)
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "encoder.embed_tokens.weight": tensors["shared.weight"].clone()}, tmp_path / "model.safetensors"
    )
    about = json.loads((tmp_path / "config.json").read_text())
    older = {name: value for name, value in about.items() if name not in ("head", "pooling", "head_kind")}
    older |= {"is_encoder_decoder": True, "num_decoder_layers": 24, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert (read_config(tmp_path).head, read_config(tmp_path).num_decoder_layers) == ("none", 0)
    back = load(tmp_path, torch.float16, expect=dataclasses.replace(shape, head="token", labels="3"))
    assert torch.equal(back.encoder.blocks[1].attention.q.weight, model.encoder.blocks[1].attention.q.weight)
    assert back.label_head is not None and back.label_head.out.weight.dtype == torch.float32
