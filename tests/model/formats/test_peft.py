"""Adapters are in PEFT's format: PEFT reads ours, we read PEFT's, and a foreign adapter is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import hf_format
from model.formats.adapter_folder import is_adapter, read_info
from model.formats.peft import load_adapters, save_adapters
from model.lora.adapter import adapters_of, add_adapters, use_adapters
from model.lora.form import LoraSettings
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from tests.model.lora.test_adapter import FORMS, GATED, logits, stir


def adapted(config: T5ModelConfig, form: LoraSettings, folder: Path) -> T5:
    """A model with adapters that have learned, saved with its base."""
    model = T5(config).initialise(1)
    hf_format.save(model, folder / "base")
    add_adapters(model, form, seed=4)
    stir(model)
    save_adapters(model, form, folder / "adapter", str(folder / "base"), "f00d")
    return model


@pytest.mark.parametrize("form", FORMS)
def test_round_trip(config: T5ModelConfig, form: LoraSettings, tmp_path: Path) -> None:
    model = adapted(config, form, tmp_path)
    info = read_info(tmp_path / "adapter")
    assert is_adapter(tmp_path / "adapter") and not is_adapter(tmp_path / "base")
    assert info.settings == dataclasses.replace(form, targets=tuple(form.targets))
    assert (info.base, info.fingerprint) == (str(tmp_path / "base"), "f00d")
    again = hf_format.load(tmp_path / "base")
    use_adapters(again, *load_adapters(again, tmp_path / "adapter"))
    assert torch.equal(logits(again), logits(model))


def test_names_are_those_of_peft(config: T5ModelConfig, tmp_path: Path) -> None:
    adapted(dataclasses.replace(config, **GATED), LoraSettings(2, 4.0, ("q", "wi_0", "wo")), tmp_path)
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    path = "base_model.model.decoder.block.2.layer"
    assert names >= {
        f"{path}.1.EncDecAttention.q.lora_A.weight",
        f"{path}.0.SelfAttention.q.lora_B.weight",
        f"{path}.2.DenseReluDense.wi_0.lora_B.weight",
        "base_model.model.encoder.block.1.layer.1.DenseReluDense.wo.lora_A.weight",
    }
    assert len(names) == 2 * (2 * 3 + 3 * 4)


def test_an_adapter_for_another_base_is_refused(config: T5ModelConfig, tmp_path: Path) -> None:
    adapted(config, LoraSettings(2, 4.0, ("q", "wi")), tmp_path)
    wider = T5(dataclasses.replace(config, d_model=16)).initialise(0)
    with pytest.raises(
        UserError, match=r"for another base: encoder.blocks.0.attention.q: a is \[2, 12\] and not \[2, 16\]"
    ):
        load_adapters(wider, tmp_path / "adapter")
    gated = T5(dataclasses.replace(config, **GATED)).initialise(0)
    with pytest.raises(
        UserError, match=r"holds 10 tensors for modules that this model does not have.*it has q, k, v, o, wi_0"
    ):
        load_adapters(gated, tmp_path / "adapter")
    shallow = T5(dataclasses.replace(config, num_decoder_layers=2)).initialise(0)
    with pytest.raises(UserError, match=r"such as base_model.model.decoder.block.2"):
        load_adapters(shallow, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type = IA3, is not supported; allowed: LORA"),
        ({"bias": "all", "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = pissa_niter_4, has changed its base besides"),
        ({"use_dora": True}, "use_dora = True, is not supported; make the adapter without it, or merge it"),
        ({"r": "v", "lora_alpha": []}, "lora_alpha = [], is wrong; allowed: a number"),
    ],
)
def test_what_has_no_place_here_is_refused(config: T5ModelConfig, tmp_path: Path, change: dict, words: str) -> None:
    adapted(config, FORMS[0], tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError) as caught:
        read_info(tmp_path / "adapter")
    assert words in str(caught.value) and len(caught.value.problems) == len(change)


def test_broken_folders_are_refused(config: T5ModelConfig, tmp_path: Path) -> None:
    model = adapted(config, FORMS[1], tmp_path)
    folder = tmp_path / "adapter"
    tensors = load_file(folder / "adapter_model.safetensors")
    lost = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({name: t for name, t in tensors.items() if name != lost}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="b is missing"):
        load_adapters(model, folder)
    (folder / "adapter_model.safetensors").write_bytes(b"12")
    with pytest.raises(UserError, match="cut off or broken"):
        read_info(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no adapter_model\.safetensors"):
        read_info(folder)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        read_info(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["t5", "gated"])
@pytest.mark.parametrize("form", FORMS)
def test_peft_computes_the_same(config: T5ModelConfig, form: LoraSettings, family: str, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    shape = dataclasses.replace(config, **(GATED if family == "gated" else {}))
    targets = tuple("wi_0" if t == "wi" and family == "gated" else t for t in form.targets)
    form = dataclasses.replace(form, targets=targets)
    model = adapted(shape, form, tmp_path)
    base = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base").eval()
    peer = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.arange(2, 22).view(2, 10)
    with torch.no_grad():
        expected = peer(input_ids=ids, decoder_input_ids=ids[:, :6]).logits
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    peer.save_pretrained(tmp_path / "back")
    back = hf_format.load(tmp_path / "base")
    use_adapters(back, *load_adapters(back, tmp_path / "back"))
    assert read_info(tmp_path / "back").fingerprint == "", "PEFT knows of no fingerprint"
    torch.testing.assert_close(logits(back), expected, rtol=1e-4, atol=1e-4)
    for path, adapter in adapters_of(back).items():
        for part, weight in adapter.named_parameters():
            assert torch.equal(weight, dict(adapters_of(model)[path].named_parameters())[part])
