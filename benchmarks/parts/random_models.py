"""Models of published shapes with random weights, written tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from model import hf_format
from model.formats.headers import WEIGHTS_FILE
from model.formats.tensor_files import write_safetensors
from model.shapes import weights
from settings.declared import T5ModelConfig


def write_random_model(folder: Path, shape: T5ModelConfig, dtype: torch.dtype = torch.float32) -> None:
    """Write a model folder without a tokenizer: weights as T5 initialises them, but for bias tables that matter.

    Memory: one tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_name = {weight.hf_name: weight for weight in weights(shape)}
    tensors = {
        name: torch.empty(
            weight.shape, dtype=torch.float32 if weight.role in ("norm", "bias table") else dtype, device="meta"
        )
        for name, weight in by_name.items()
    }
    numbers = {name: number for number, name in enumerate(by_name)}

    @contextmanager
    def pieces(name: str) -> Iterator[list[Tensor]]:
        weight = by_name[name]
        generator = torch.Generator().manual_seed(numbers[name])
        values = torch.ones(weight.shape)
        if weight.role != "norm":
            scale = 1.0 if weight.role in ("embedding", "bias table") else weight.shape[-1] ** -0.5
            if weight.role == "q":
                scale *= shape.d_kv**-0.5
            values.normal_(0.0, scale, generator=generator)
        yield [values.to(tensors[name].dtype)]

    write_safetensors(tensors, folder / WEIGHTS_FILE, pieces)
    hf_format.write_config(shape, folder, dtype)
