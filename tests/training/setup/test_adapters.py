"""An adapter goes on in its own form, beside others, and over its base alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from model import hf_format
from model.formats.adapter_folder import read_info
from model.formats.peft import save_adapters
from model.lora.adapter import adapters_of, add_adapters
from model.lora.form import LoraSettings
from model.t5 import T5
from settings.declared import Config, T5ModelConfig
from settings.errors import UserError
from settings.loading import load
from training.saved_model import SavedModel
from training.setup.adapter_settings import check_trained
from training.setup.adapters import attach, choose_trained, fingerprint_of

SHAPE = T5ModelConfig(vocab_size=61, d_model=24, d_kv=8, d_ff=40, num_layers=1, num_decoder_layers=2, num_heads=3)


def run_config(**flags: object) -> Config:
    return dataclasses.replace(load("train", {"train_file": "x", "is_finetune": "True", **flags}), model=SHAPE)


def problems_of(work: object, *arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        work(*arguments)  # type: ignore[operator]
    return str(caught.value)


def logits(model: T5) -> torch.Tensor:
    ids = torch.arange(2, 22).view(2, 10)
    with torch.no_grad():
        return model.logits(ids, ids[:, :6])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    hf_format.save(T5(SHAPE).initialise(1), tmp_path / "base")
    return tmp_path / "base"


def make_adapter(base: Path, folder: Path, seed: int, **changes: object) -> Path:
    model = hf_format.load(base)
    settings = LoraSettings(**{"rank": 2, "alpha": 4.0, **changes})  # type: ignore[arg-type]
    for index, adapter in enumerate(add_adapters(model, settings, seed).values()):
        adapter.b.data.normal_(generator=torch.Generator().manual_seed(seed * 100 + index))
    save_adapters(model, settings, folder, str(base), fingerprint_of(base))
    return folder


def chosen(model: T5, config: Config, start: Path, base: Path) -> T5:
    return choose_trained(model, config.lora, config.train.freeze, config.run.seed, start, base)


def test_an_adapter_goes_on_in_its_own_form(base: Path, tmp_path: Path) -> None:
    form = {"alpha": 1.0, "targets": ("q", "wo")}
    folder = make_adapter(base, tmp_path / "a", 1, **form)
    config = run_config(lora_rank=2).with_saved(SavedModel.read(folder).adapter_form)
    assert check_trained(config.model, config.lora, config.train.freeze, folder) == []
    model = chosen(hf_format.load(base), config, folder, base)
    expected = hf_format.load(base)
    attach(expected, [folder], base)
    assert torch.equal(logits(model), logits(expected))
    assert all(weight.requires_grad for adapter in adapters_of(model).values() for weight in adapter.parameters())
    assert model.adapter_info is not None and model.adapter_info.settings == read_info(folder).settings
    flags = {"lora_rank": "3", "lora_alpha": "8.0", "lora_targets": "q,k"}
    other = run_config(**flags).with_saved(SavedModel.read(folder).adapter_form)
    problems = check_trained(other.model, other.lora, other.train.freeze, folder)
    assert {problem.split(" = ")[0].removeprefix("--") for problem in problems} == set(flags)
    assert "--lora_rank" in problems_of(chosen, hf_format.load(base), other, folder, base)


def test_several_adapters_over_one_base(base: Path, tmp_path: Path) -> None:
    folders = [make_adapter(base, tmp_path / "one", 1), make_adapter(base, tmp_path / "two", 2, targets=("k",))]
    model = hf_format.load(base)
    plain = logits(model)
    adapters = attach(model, folders, base)
    assert list(adapters.by_name) == ["one", "two"]
    first = logits(model)
    adapters.set_adapter("two")
    second = logits(model)
    adapters.set_adapter(None)
    assert torch.equal(logits(model), plain)
    adapters.set_adapter("one")
    assert torch.equal(logits(model), first)
    assert not any(torch.equal(a, b) for a, b in ((plain, first), (plain, second), (first, second)))
    assert "there are: one, two" in problems_of(adapters.set_adapter, "three")
    assert "folders of one name" in problems_of(attach, model, [folders[0], folders[0]], base)


def test_an_adapter_belongs_to_its_base(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "adapter", 1)
    hf_format.save(T5(SHAPE).initialise(2), tmp_path / "other")
    assert SavedModel.read(folder).base == base and SavedModel.read(base).base == base
    assert SavedModel.read(folder, moved_base=str(tmp_path / "other")).base == tmp_path / "other", (
        "moved, says the user"
    )
    said = problems_of(attach, hf_format.load(tmp_path / "other"), [folder], tmp_path / "other")
    assert "is for another base" in said and str(base) in said
    attach(hf_format.load(tmp_path / "other"), [folder])  # a base without a folder cannot be checked
    (base / "config.json").unlink()
    assert "is not there; put it back" in problems_of(lambda: SavedModel.read(folder).base)
    assert "holds no adapter_config.json" in problems_of(SavedModel.read, base, f"{folder},{base}")
    assert "lost, no such folder" in problems_of(SavedModel.read, base, str(tmp_path / "lost"))
