"""What learns in a run, and what belongs together: choices, refusals, several adapters, merging, int8 folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from commands.merge import merge
from model import hf_format
from model.formats.adapter_folder import read_info
from model.formats.peft import save_adapters
from model.lora.adapter import adapters_of, add_adapters
from model.lora.form import AdapterInfo, LoraSettings
from model.quantization import is_int8
from model.t5 import T5
from settings.declared import Config, T5ModelConfig
from settings.errors import UserError
from settings.loading import load
from training.saved_model import SavedModel
from training.setup.adapter_settings import check_trained
from training.setup.adapters import attach, choose_trained, fingerprint_of, note_origin

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


def problems_before(config: Config, start: Path | None) -> list[str]:
    return check_trained(config.model, config.lora, config.train.freeze, start)


def test_a_run_learns_its_adapters_alone(base: Path) -> None:
    config = run_config(lora_rank=4, lora_targets="q,wo", lora_dropout=0.1)
    model = chosen(hf_format.load(base), config, base, base)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained and all(".adapter." in name for name in trained)
    assert model.adapter_info == AdapterInfo(
        LoraSettings(4, 8.0, ("q", "wo"), 0.1), str(base.resolve()), fingerprint_of(base)
    )
    assert model.adapter_dropout == 0.1 and config.train.optimizer == "adamw"
    frozen = chosen(hf_format.load(base), run_config(lora_rank=4, freeze="encoder"), base, base)
    assert {n.split(".")[0] for n, w in frozen.named_parameters() if w.requires_grad} == {"decoder"}


def test_the_alpha_of_a_rank_stabilised_adapter_is_divided_by_the_root_of_its_rank(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "a", 1, rank=4, alpha=3.0)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_rslora": True}))
    assert read_info(folder).settings.scaling == 3.0 / 2


def test_an_adapter_goes_on_in_its_own_form(base: Path, tmp_path: Path) -> None:
    form = {"alpha": 1.0, "targets": ("q", "wo")}
    folder = make_adapter(base, tmp_path / "a", 1, **form)
    config = run_config(lora_rank=2).with_saved(SavedModel.read(folder).adapter_form)
    assert problems_before(config, folder) == []
    model = chosen(hf_format.load(base), config, folder, base)
    expected = hf_format.load(base)
    attach(expected, [folder], base)
    assert torch.equal(logits(model), logits(expected))
    assert all(weight.requires_grad for adapter in adapters_of(model).values() for weight in adapter.parameters())
    assert model.adapter_info is not None and model.adapter_info.settings == read_info(folder).settings
    flags = {"lora_rank": "3", "lora_alpha": "8.0", "lora_targets": "q,k"}
    other = run_config(**flags).with_saved(SavedModel.read(folder).adapter_form)
    problems = problems_before(other, folder)
    assert {problem.split(" = ")[0].removeprefix("--") for problem in problems} == set(flags)
    assert "--lora_rank" in problems_of(chosen, hf_format.load(base), other, folder, base)


@pytest.mark.parametrize(
    ("flags", "start", "words"),
    [
        ({"lora_rank": 4}, None, "a base to adapt is needed"),
        ({}, "adapter", "is an adapter; continue with it by --lora_rank=2"),
        (
            {"lora_rank": 4, "lora_targets": "q,x"},
            "base",
            "x is not a module of this model; allowed: q, k, v, o, wi, wo",
        ),
        ({"lora_rank": 25}, "base", "--lora_rank = 25, is more than the width of the matrices (24)"),
        ({"freeze": "encoders"}, "base", "--freeze = encoders, names no weight of this model"),
        ({"lora_rank": 4, "freeze": "*"}, "base", "leaves nothing to train"),
    ],
)
def test_refusals_before_anything_is_loaded(base: Path, tmp_path: Path, flags: dict, start: str, words: str) -> None:
    make_adapter(base, tmp_path / "adapter", 1)
    problems = problems_before(run_config(**flags), None if start is None else tmp_path / start)
    assert len(problems) == 1 and words in problems[0]
    assert not problems_before(run_config(lora_rank=4, freeze="encoder"), base)


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


def merge_config(output: Path, **flags: object) -> Config:
    return load("merge", {"output": str(output), **flags})


def test_merge_writes_a_plain_folder_with_equal_logits(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "adapter", 1, targets=("q", "wi"))
    flags = {"adapter": str(folder)}
    assert merge(merge_config(tmp_path / "merged", **flags)) < 1e-5
    adapted = hf_format.load(base)
    attach(adapted, [folder], base)
    merged = hf_format.load(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    assert (logits(merged) - logits(hf_format.load(base))).abs().max() > 0.01
    said = problems_of(merge, merge_config(tmp_path / "merged", **flags))
    assert "exists; choose another folder or use --overwrite=True" in said
    merge(merge_config(tmp_path / "merged", overwrite="True", **flags))


def test_merge_refuses(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "adapter", 1)
    assert "= none, merging takes one" in problems_of(merge, merge_config(tmp_path / "out", model=str(base)))
    assert "--output = none, is needed" in problems_of(merge, load("merge", {"adapter": str(folder)}))
    said = problems_of(merge, merge_config(base, adapter=str(folder), overwrite="True"))
    assert "is the folder that is read" in said and (base / "config.json").exists()
    hf_format.save(hf_format.load(base, torch.int8), tmp_path / "int8")
    note_origin(tmp_path / "int8", base)
    said = problems_of(merge, merge_config(tmp_path / "out", adapter=str(folder), model=str(tmp_path / "int8")))
    assert "has int8 weights" in said
    assert not (tmp_path / "out").exists()


def test_adapters_over_an_int8_folder(base: Path, tmp_path: Path) -> None:
    small = hf_format.load(base, torch.int8)
    hf_format.save(small, tmp_path / "int8")
    folder = make_adapter(base, tmp_path / "adapter", 1)
    assert "another base" in problems_of(attach, small, [folder], tmp_path / "int8")
    note_origin(tmp_path / "int8", base)
    small = hf_format.load(tmp_path / "int8", torch.int8)
    before = logits(small)
    attach(small, [folder], tmp_path / "int8")
    adapted = hf_format.load(base)
    attach(adapted, [tmp_path / "adapter"], base)
    assert is_int8(small.embedding) and not torch.equal(logits(small), before)
    assert float((logits(small) - logits(adapted)).norm() / logits(adapted).norm()) < 0.05
