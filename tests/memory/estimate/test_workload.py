"""What learns is counted as a real model with frozen parts or adapters has it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from memory.estimate.workload import trained_counts
from model.lora.freezing import freeze
from model.t5 import T5
from settings.loading import load
from training.setup.adapters import choose_trained

SMALL = {"num_layers": 2, "num_decoder_layers": 3, "vocab_size": 300}


def settings_of(preset: str = "tiny", **flags: Any) -> Any:
    words = {"train_file": "x", "model_preset": preset, **SMALL, **flags}
    return load("train", {name: str(value) for name, value in words.items()})


@pytest.mark.parametrize(
    ("preset", "patterns"),
    [
        ("tiny", "embedding,decoder.blocks.0"),
        ("umt5-small", "shared.weight,encoder.block.0.layer.1"),
    ],
)
def test_frozen_parts(preset: str, patterns: str) -> None:
    config = settings_of(preset, freeze=patterns)
    model = T5(config.model, device="meta")
    freeze(model, patterns)
    learns = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
    counts = trained_counts(config.model, config.lora, config.train.freeze)
    assert counts.parts["total"] == sum(learns.values())
    assert counts.parts["embedding"] == learns.get("embedding", 0)
    blocks = [sum(n for name, n in learns.items() if name.startswith(f"encoder.blocks.{index}.")) for index in range(2)]
    assert counts.parts["encoder"] == max(blocks)


@pytest.mark.parametrize("targets", ["auto", "all"])
def test_adapters(targets: str) -> None:
    config = settings_of("t5-v1.1-small", lora_rank=4, lora_targets=targets, is_finetune=True)
    model = choose_trained(T5(config.model).initialise(0), config.lora, config.train.freeze, 0)
    learns = [tuple(weight.shape) for weight in model.parameters() if weight.requires_grad]
    counts = trained_counts(config.model, config.lora, config.train.freeze)
    assert counts.parts["total"] == counts.adapters == sum(map(math.prod, learns))
    assert counts.factors == sum(map(sum, learns))
    assert counts.parts["embedding"] == counts.parts["head"] == 0
