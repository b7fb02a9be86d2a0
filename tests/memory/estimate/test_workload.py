"""What learns is counted as a real model with frozen parts or adapters has it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from memory.estimate.peaks import predict
from memory.estimate.workload import Machine, trained_counts
from memory.plan import plan
from memory.step_work import make_work
from model.lora.freezing import freeze
from model.shapes import weight_counts
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


def test_int4_is_taken_where_it_is_named() -> None:
    shape = {"num_layers": 12, "num_decoder_layers": 12, "max_seq_len": 32, "effective_batch_size": 2}
    config = settings_of("t5-base", lora_rank=4, is_finetune=True, lora_base="int4", **shape)
    machine = Machine(8 * 10**9, 16 * 10**9, rates=(("float32", 1e11), ("bfloat16", 1e9)))
    chosen = plan(config, machine).choice
    assert chosen.storage == "int4"
    work = make_work(config, machine, None, None)
    packed, bytes_of = (predict(work, replace(chosen, storage=base), machine) for base in ("int4", "int8"))
    blocks = weight_counts(config.model)["total"] - weight_counts(config.model)["embedding"]
    saved = bytes_of["load"]["weights"] - packed["load"]["weights"]
    assert saved == pytest.approx(blocks * 30 / 64, rel=1e-3)
