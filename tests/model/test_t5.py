from __future__ import annotations

import torch

from model.t5 import T5
from settings.declared import T5ModelConfig


def test_initial_values_depend_on_the_seed_alone(config: T5ModelConfig) -> None:
    model, again, other = T5(config).initialise(3), T5(config).initialise(3), T5(config).initialise(4)
    half = T5(config, dtype=torch.bfloat16).initialise(3)
    for (name, weight), same, narrow in zip(
        model.named_parameters(), again.parameters(), half.parameters(), strict=True
    ):
        assert torch.equal(weight, same)
        kept_wide = "norm" in name or "table" in name
        assert narrow.dtype == (torch.float32 if kept_wide else torch.bfloat16), name
        assert torch.equal(narrow, weight.to(narrow.dtype))
    assert not torch.equal(model.embedding, other.embedding)
    assert not torch.equal(model.encoder.blocks[0].attention.k.weight, model.encoder.blocks[1].attention.k.weight)
