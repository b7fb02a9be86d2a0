"""What learns is counted as a real model with frozen parts or adapters has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from config import load
from memory.cost.trained import trained_counts
from memory.cost.work import BASE_BYTES, Machine
from memory.plan import plan
from model.lora.freezing import freeze
from model.shapes import weight_counts
from model.t5 import T5
from training.start.adapters import choose_trained

SMALL = {"num_layers": 2, "num_decoder_layers": 3, "vocab_size": 300}


def settings_of(preset: str = "tiny", **flags: Any) -> Any:
    words = {"train_file": "x", "model_preset": preset, **SMALL, **flags}
    return load("train", {name: str(value) for name, value in words.items()})


@pytest.mark.parametrize("preset", ["tiny", "umt5-small"])
@pytest.mark.parametrize(
    "patterns",
    [
        "encoder",
        "embedding,decoder.blocks.0",
        "*.q.weight",
        "norms,position_bias",
        "shared.weight,encoder.block.0.layer.1",
    ],
)
def test_frozen_parts(preset: str, patterns: str) -> None:
    config = settings_of(preset, freeze=patterns)
    model = T5(config.model, device="meta")
    freeze(model, patterns)
    learns = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
    counts = trained_counts(config)
    assert counts.total == sum(learns.values())
    assert counts.embedding == learns.get("embedding", 0)
    blocks = [sum(n for name, n in learns.items() if name.startswith(f"encoder.blocks.{index}.")) for index in range(2)]
    assert counts.encoder == max(blocks)


@pytest.mark.parametrize(("targets", "dora"), [("auto", False), ("all", True), ("wi_0,o", False)])
def test_adapters(targets: str, dora: bool) -> None:
    config = settings_of("t5-v1.1-small", lora_rank=4, lora_targets=targets, use_dora=dora, is_finetune=True)
    model = choose_trained(T5(config.model).initialise(0), config)
    learns = [tuple(weight.shape) for weight in model.parameters() if weight.requires_grad]
    counts = trained_counts(config)
    assert (
        counts.total == counts.adapters == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    )
    assert counts.factors == sum(map(sum, learns))
    assert counts.embedding == counts.head == 0


def test_a_base_in_int8_is_the_last_resort() -> None:
    rows = {"max_seq_len": 32, "effective_batch_size": 2}
    config = settings_of(
        "t5-base", lora_rank=4, is_finetune=True, num_layers=12, num_decoder_layers=12, vocab_size=8192, **rows
    )
    weights = 4 * weight_counts(config.model)["total"]
    machine = Machine(BASE_BYTES + 8 * weights, 16 * 10**9)
    assert plan(config, machine).choice.storage in ("float32", "bfloat16")
    config = config.changed(mixed_precision="no")
    tight = replace(machine, budget_bytes=BASE_BYTES + int(0.9 * weights))
    assert plan(config, tight).choice.storage == "int8"
    named = plan(config.changed(lora_base="fp32"), tight).choice
    assert named.storage == "float32" and named.away_blocks, "a dtype that is named is kept, and rests in a file"
