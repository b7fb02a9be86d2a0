"""A model folder made in a moment: random weights that write different things, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import torch

from data.tokenizers.training import byte_tokenizer
from model import hf_format
from model.t5 import T5
from settings.declared import T5ModelConfig

SHAPE = T5ModelConfig(vocab_size=384, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=2, num_heads=2)


def save_trained(folder: Path, seed: int = 3, dtype: torch.dtype = torch.float32, shape: T5ModelConfig = SHAPE) -> Path:
    """Write the folder."""
    model = T5(shape).initialise(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and name != "embedding":
                weight.mul_(4.0)
    narrow = T5(shape, dtype=dtype)
    narrow.load_state_dict(model.state_dict())
    hf_format.save(narrow, folder)
    byte_tokenizer().save(folder)
    return folder
