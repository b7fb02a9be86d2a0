"""The one description of the model is the model's, and transformers'."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from model.lora.adapter import add_adapters
from model.lora.form import LoraSettings
from model.shapes import (
    adapter_weights,
    block_weights,
    is_block_matrix,
    requested_targets,
    targets_of,
    weight_counts,
    weights,
)
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.loading import load
from settings.precedence import model_presets

SMALL = {
    "num_layers": 2,
    "num_decoder_layers": 3,
    "vocab_size": 50,
    "d_model": 24,
    "d_ff": 40,
    "d_kv": 5,
    "num_heads": 3,
}
PRESETS = sorted(model_presets())
CONFIGS = [
    replace(T5ModelConfig(**SMALL), feed_forward_proj=activation, tie_word_embeddings=tied, bias_in_every_layer=every)
    for activation, tied, every in (("relu", True, False), ("gated-gelu", False, False), ("gated-gelu", True, True))
]


def told(config: T5ModelConfig) -> str:
    return f"{config.feed_forward_proj} tied={config.tie_word_embeddings} umt5={config.bias_in_every_layer}"


def shapes_of(model: torch.nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]


@pytest.mark.parametrize("preset", PRESETS)
def test_of_each_preset_as_the_model(preset: str) -> None:
    config = load("train", {"train_file": "x", "model_preset": preset}).model
    model = T5(config, device="meta")
    assert [(weight.name, weight.shape) for weight in weights(config)] == shapes_of(model), "and in the same order"
    counts = weight_counts(config)
    assert counts["total"] == sum(weight.numel() for weight in model.parameters())
    assert counts["embedding"] == model.embedding.numel()
    assert counts["head"] == (0 if model.head is None else model.head.numel())
    for stack, blocks in (("encoder", model.encoder.blocks), ("decoder", model.decoder.blocks)):
        assert counts[stack] == sum(weight.numel() for weight in blocks[-1].parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=told)
@pytest.mark.parametrize("targets", ["auto", "all"])
def test_adapters_as_they_are_put_on(config: T5ModelConfig, targets: str) -> None:
    model, names = T5(config).initialise(0), requested_targets(config, targets)
    assert set(names) <= set(targets_of(config)) == {w.target for w in block_weights(config, "encoder") if w.is_product}
    add_adapters(model, LoraSettings(2, 4.0, names))
    described = [(weight.name, weight.shape) for weight in adapter_weights(config, 2, names)]
    assert sorted(described) == sorted((name, shape) for name, shape in shapes_of(model) if ".adapter." in name)
    assert all(is_block_matrix(name, shape) for name, shape in described)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=told)
def test_names_and_shapes_of_transformers(config: T5ModelConfig) -> None:
    import transformers

    kind = "UMT5" if config.bias_in_every_layer else "T5"
    values = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("bias_in_every_layer", "decoder_start_token_id")
    }
    theirs_config = getattr(transformers, f"{kind}Config")(**values, decoder_start_token_id=0)
    with torch.device("meta"):
        peer = getattr(transformers, f"{kind}ForConditionalGeneration")(theirs_config)
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    if config.tie_word_embeddings:
        copies.add("lm_head.weight")
    theirs_shapes = {name: tuple(weight.shape) for name, weight in peer.state_dict().items() if name not in copies}
    assert {weight.hf_name: weight.shape for weight in weights(config)} == theirs_shapes
