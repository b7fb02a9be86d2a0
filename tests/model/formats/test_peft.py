"""Adapters are in PEFT's format: PEFT reads ours, we read PEFT's, and a foreign adapter is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from model import hf_format
from model.formats.adapter_folder import is_adapter, read_info
from model.formats.peft import load_adapters, save_adapters
from model.lora.adapter import add_adapters, use_adapters
from model.lora.form import LoraSettings
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from tests.model.lora.test_adapter import FORM, GATED, logits, stir


def adapted(config: T5ModelConfig, form: LoraSettings, folder: Path) -> T5:
    """A model with adapters that have learned, saved with its base."""
    model = T5(config).initialise(1)
    hf_format.save(model, folder / "base")
    add_adapters(model, form, seed=4)
    stir(model)
    save_adapters(model, form, folder / "adapter", str(folder / "base"), "f00d")
    return model


def test_round_trip(config: T5ModelConfig, tmp_path: Path) -> None:
    model = adapted(config, FORM, tmp_path)
    info = read_info(tmp_path / "adapter")
    assert is_adapter(tmp_path / "adapter") and not is_adapter(tmp_path / "base")
    assert info.settings == FORM
    assert (info.base, info.fingerprint) == (str(tmp_path / "base"), "f00d")
    again = hf_format.load(tmp_path / "base")
    use_adapters(again, *load_adapters(again, tmp_path / "adapter"))
    assert torch.equal(logits(again), logits(model))


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type = IA3, is not supported; allowed: LORA"),
        ({"use_dora": True}, "use_dora = True, is not supported; make the adapter without it, or merge it"),
        ({"r": "v", "lora_alpha": []}, "lora_alpha = [], is wrong; allowed: a number"),
    ],
)
def test_what_has_no_place_here_is_refused(config: T5ModelConfig, tmp_path: Path, change: dict, words: str) -> None:
    adapted(config, FORM, tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError) as caught:
        read_info(tmp_path / "adapter")
    assert words in str(caught.value) and len(caught.value.problems) == len(change)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_computes_the_same(config: T5ModelConfig, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    form = LoraSettings(4, 8.0, ("q", "k", "v", "o", "wi_0", "wo"))
    model = adapted(dataclasses.replace(config, **GATED), form, tmp_path)
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
