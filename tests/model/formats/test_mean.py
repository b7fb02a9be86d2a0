"""The mean of folders is each number's mean, in the form of the last of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from devices.sizes import FILE_CHUNK_BYTES
from model import hf_format
from model.formats.mean import write_mean
from model.t5 import T5
from settings.declared import T5ModelConfig


def saved(
    folder: Path, config: T5ModelConfig, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    hf_format.save(T5(config, "cpu", dtype).initialise(seed), folder)
    return load_file(folder / "model.safetensors")


def test_each_number(config: T5ModelConfig, tmp_path: Path) -> None:
    wide = replace(config, vocab_size=FILE_CHUNK_BYTES // (4 * config.d_model) + 10)  # two chunks of the embedding
    parts = [saved(tmp_path / str(seed), wide, seed, torch.bfloat16) for seed in range(3)]
    target = tmp_path / "made"
    target.mkdir()
    write_mean([tmp_path / str(seed) for seed in range(3)], target)
    for name, got in load_file(target / "model.safetensors").items():
        exact = torch.stack([part[name].double() for part in parts]).mean(0)
        assert got.dtype == parts[0][name].dtype, "as it was stored"
        torch.testing.assert_close(got.double(), exact.to(got.dtype).double(), rtol=2**-7, atol=1e-7)
    hf_format.load(target)
