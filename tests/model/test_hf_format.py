from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.hf_format import load, save
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from tests.measuring import in_child

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    shutil.copytree(GOLDEN / "t5", tmp_path / "t5")
    return tmp_path / "t5"


def change_config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(folder)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("family", ["t5", "umt5", "byt5"])
def test_names_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    save(load(GOLDEN / family), tmp_path)
    ours, peer = (load_file(path / "model.safetensors") for path in (tmp_path, GOLDEN / family))
    assert ours.keys() == peer.keys()
    assert all(torch.equal(ours[name], peer[name]) for name in peer)


def test_published_umt5_is_folded_into_a_scaled_one(tmp_path: Path) -> None:
    """Trained unscaled; transformers 5 would scale it, so the final norm takes the factor and the function stays."""
    shutil.copytree(GOLDEN / "umt5", tmp_path / "umt5")
    scaled = load(tmp_path / "umt5")
    change_config(tmp_path / "umt5", tie_word_embeddings=False)
    change_weights(
        tmp_path / "umt5", lambda weights: weights.update({"lm_head.weight": weights["shared.weight"].clone()})
    )
    folded = load(tmp_path / "umt5")
    assert folded.config.scale_decoder_outputs
    factor = folded.config.d_model**0.5
    ids = torch.tensor([[4, 5, 1]])
    torch.testing.assert_close(folded.logits(ids, ids), scaled.logits(ids, ids) * factor)
    save(folded, tmp_path / "again")
    assert torch.equal(load(tmp_path / "again").logits(ids, ids), folded.logits(ids, ids))


def test_shards(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    whole = load(folder)
    (folder / "model.safetensors").unlink()
    names, addresses = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        addresses.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": addresses}))
    for ours, peer in zip(load(folder).parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, peer)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors", "is not there")


def test_missing_and_foreign_tensors_are_listed(folder: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.startswith("encoder.block.1")]:
            del weights[name]
        weights["classifier.weight"] = torch.zeros(2)

    change_weights(folder, change)
    refused(
        folder,
        "lacks 8 tensors",
        "encoder.block.1.layer.0.SelfAttention.k.weight",
        "encoder.block.1.layer.1.DenseReluDense.wo.weight",
        "1 tensor that",
        "classifier.weight",
    )


def test_memory_of_loading_and_saving(tmp_path: Path) -> None:
    size, saving, loading, with_pages = in_child(f"""
from pathlib import Path
from config import T5ModelConfig
from devices.malloc import trim_malloc
from model.hf_format import load, save
from model.quantization import dequantize
from model.t5 import T5

small = T5ModelConfig(vocab_size=64, d_model=16, num_layers=1, num_decoder_layers=1)
save(T5(small).initialise(0), "{tmp_path}/small")
load("{tmp_path}/small")
model = T5(T5ModelConfig(vocab_size=16000, num_layers=2, num_decoder_layers=2)).initialise(0)
size = sum(weight.nbytes for weight in model.parameters())
saving = measure(lambda: save(model, "{tmp_path}/model"))
trim_malloc()  # what was freed before would be taken again, and so not be seen
print(size, saving, measure(lambda: load("{tmp_path}/model")))
trim_malloc()
print(measure(lambda: load("{tmp_path}/model"), "VmRSS"))
""")
    assert saving < size / 8
    # the lower bound: something was measured
    assert 0.7 * size < loading < size + 2**23
    assert with_pages < size + 2**24, "the file's pages stayed beside the model"


@pytest.mark.parametrize("name", ["num_layers", "d_model"])
def test_a_configuration_asks_for_no_more_than_its_tensors(folder: Path, name: str) -> None:
    change_config(folder, **{name: 10**12})
    refused(folder, name, "use the config.json that belongs to them")


@pytest.mark.parametrize("name", ["../model.safetensors", 7])
def test_an_index_names_files_of_its_own_folder_alone(folder: Path, name: object) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"shared.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for allow_pickle in (False, True):
        with pytest.raises(UserError, match=r"as a file of weights; allowed: \.safetensors files of its own folder"):
            load(folder, allow_pickle=allow_pickle)


def test_new_tokens_begin_as_the_mean_of_their_pieces(config: T5ModelConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(config, vocab_size=20, tie_word_embeddings=False, scale_decoder_outputs=False)
    save(T5(config).initialise(3), tmp_path)
    larger = dataclasses.replace(config, vocab_size=22)
    model = load(tmp_path, expect=larger, pieces={18: [3, 5], 19: [4], 20: [4, 4, 7], 21: []})
    base = load(tmp_path)
    for name in ("embedding", "head"):
        ours, peer = model.get_parameter(name).detach(), base.get_parameter(name).detach()
        assert torch.equal(ours[:18], peer[:18])
        means = torch.stack([peer[[3, 5]].mean(0), peer[4], peer[[4, 4, 7]].mean(0)])
        torch.testing.assert_close(ours[18:21], means)
        assert 0.2 < ours[21].std() / peer.std() < 5


def test_a_mapped_model_is_the_same_and_leaves_its_file_alone(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "t5_v1_1", tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "model.safetensors").read_bytes()
    mapped, copied = load(tmp_path, maps=True), load(tmp_path)
    for name, weight in copied.named_parameters():
        assert torch.equal(mapped.get_parameter(name), weight), name
    with torch.no_grad():
        for weight in mapped.parameters():
            weight.add_(1.0)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_pickle_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin is not read", "convert --model", "--allow_pickle=True")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "holds no model.safetensors")
