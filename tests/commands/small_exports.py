"""Small models of each family, saved with a tokenizer, and the settings that export them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from data.tokenizers.tokenizer import Tokenizer
from model import hf_format
from model.t5 import T5
from settings.declared import Config, T5ModelConfig
from settings.loading import load
from tests import warm

TEXTS = [f"a river runs under a bridge {number}, and it's 3 o'clock; 中文" for number in range(100)]
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5_v1_1": {**GATED, "scale_decoder_outputs": False},
    "umt5": {**GATED, "bias_in_every_layer": True},
    "madlad": {**GATED, "scale_decoder_outputs": False, "decoder_start_token_id": 3},
}

WIDE = {"d_model": 768, "d_ff": 2048, "num_heads": 12, "d_kv": 64}  # 33 million weights.
WITH_NAMED_BUDGET = """
import re
import sys

from commands.export import export
from settings.errors import DoesNotFit
from settings.loading import load

flags = dict(word.split("=", 1) for word in sys.argv[1:])
budget = "1M"
while True:
    try:
        export(load("export", {**flags, "memory_budget": budget}))
        break
    except DoesNotFit as error:
        budget = re.search("--memory_budget=([0-9]+M) or more", str(error))[1]
"""


def saved(folder: Path, tokenizer: Tokenizer, **fields: Any) -> tuple[Path, T5]:
    """A small model that looks at distances and at its source, and a tokenizer beside it."""
    facts = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 3, "num_decoder_layers": 2, **fields}
    model = T5(T5ModelConfig(vocab_size=tokenizer.size + 8, **facts)).initialise(3)
    for name, weight in model.named_parameters():
        if name.endswith("bias.table"):
            weight.data.normal_(generator=torch.Generator().manual_seed(1))
        if name.endswith(("0.feed_forward.wo.weight", "1.attention.o.weight")):
            weight.data.mul_(4.0)
    hf_format.save(model, folder)
    tokenizer.save(folder)
    return folder, hf_format.load(folder)


def settings(source: Path, output: Path, form: str, **flags: str) -> Config:
    return load("export", {"model": str(source), "output": str(output), "format": form, **flags})


def export_with_named_budget(**flags: object) -> None:
    """Export in a child with the budget that a refusal names; it takes no more, or this raises."""
    done = warm.run(WITH_NAMED_BUDGET, [f"{name}={value}" for name, value in flags.items()], os.environ)
    assert done.returncode == 0, done.stderr
