"""What learns is counted as a real model with frozen parts or adapters has it."""

from __future__ import annotations

import math
from typing import Any

from memory.estimate.workload import trained_counts
from model.lora.freezing import freeze
from model.t5 import T5
from settings.loading import load
from training.setup.adapters import choose_trained

SMALL = {"num_layers": 2, "num_decoder_layers": 3, "vocab_size": 300}


def settings_of(preset: str, **flags: Any) -> Any:
    words = {"train_file": "x", "model_preset": preset, **SMALL, **flags}
    return load("train", {name: str(value) for name, value in words.items()})


def test_frozen_parts() -> None:
    patterns = "shared.weight,encoder.block.0.layer.1"
    config = settings_of("umt5-small", freeze=patterns)
    model = T5(config.model, device="meta")
    freeze(model, patterns)
    learns = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
    counts = trained_counts(config.model, config.lora, config.train.freeze)
    assert counts.parts["total"] == sum(learns.values())
    assert counts.parts["embedding"] == learns.get("embedding", 0)
    blocks = [sum(n for name, n in learns.items() if name.startswith(f"encoder.blocks.{index}.")) for index in range(2)]
    assert counts.parts["encoder"] == max(blocks)


def test_adapters() -> None:
    config = settings_of("t5-v1.1-small", lora_rank=4, lora_targets="all", is_finetune=True)
    model = choose_trained(T5(config.model).initialise(0), config.lora, config.train.freeze, 0)
    learns = [tuple(weight.shape) for weight in model.parameters() if weight.requires_grad]
    counts = trained_counts(config.model, config.lora, config.train.freeze)
    assert counts.parts["total"] == counts.adapters == sum(map(math.prod, learns))
    assert counts.factors == sum(map(sum, learns))
    assert counts.parts["embedding"] == counts.parts["head"] == 0
