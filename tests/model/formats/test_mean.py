"""The mean of folders is each number's mean, in the form of the last of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from devices.sizes import FILE_CHUNK_BYTES
from model import hf_format
from model.formats.mean import write_mean
from model.t5 import T5
from settings.declared import T5ModelConfig
from tests.measuring import in_child

TENSOR_BYTES = 16 * 2**20
# warmed up, so that what libraries take once does not count
MEMORY = """
from pathlib import Path
from devices.malloc import tune_malloc
from model.formats.mean import write_mean

tune_malloc("small")  # as a run does
folder = Path(sys.argv[1])
for name in ("warm", "large"):
    made = folder / f"mean of {name}"
    made.mkdir()
    taken = measure(lambda: write_mean([folder / name / str(seed) for seed in range(4)], made))
print(taken)
"""


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


def test_models_of_other_shapes_have_none(tmp_path: Path) -> None:
    for name, width in (("0", 4), ("1", 8)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.zeros(2, width)}, tmp_path / name / "model.safetensors")
    target = tmp_path / "made"
    target.mkdir()
    with pytest.raises(ValueError, match="holds other tensors"):
        write_mean([tmp_path / "0", tmp_path / "1"], target)


def test_it_takes_less_than_the_folders_hold(tmp_path: Path) -> None:
    """Two tensors at most, the one that was written and the next, and two chunks."""
    for name, rows in (("warm", 8), ("large", TENSOR_BYTES // 4096)):
        for seed in range(4):
            (tmp_path / name / str(seed)).mkdir(parents=True)
            weights = {str(number): torch.full((rows, 1024), float(seed)) for number in range(4)}
            save_file(weights, tmp_path / name / str(seed) / "model.safetensors")
    (peak,) = in_child(MEMORY, tmp_path)
    assert peak < 2 * TENSOR_BYTES + 2 * FILE_CHUNK_BYTES + 8 * 2**20, "the folders hold 16 tensors"
    assert load_file(tmp_path / "mean of large" / "model.safetensors")["0"].unique().tolist() == [1.5]
