"""Rows of tokens that learn beside adapters: gradients of the engine, merging, PEFT's folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.blockwise import Blockwise
from engine.weights import weight_store_for
from model import hf_format
from model.formats.adapter_folder import read_info
from model.formats.peft import load_adapters, save_adapters
from model.lora.adapter import adapters_off, add_adapters, merge, use_adapters
from model.lora.form import LoraSettings
from model.loss import LossSettings
from model.t5 import T5
from settings.declared import T5ModelConfig
from tests.engine.small_models import Rectangle, autograd_gradients, relative_error

SHAPE = T5ModelConfig(vocab_size=61, d_model=24, d_kv=8, d_ff=40, num_layers=1, num_decoder_layers=1, num_heads=3)
UNTIED = dataclasses.replace(SHAPE, tie_word_embeddings=False, scale_decoder_outputs=False)
TOKENS = (57, 62)  # The base has four of them.
LORA = LoraSettings(2, 4.0, tokens=TOKENS)
IDS, LABELS = torch.tensor([[57, 3, 62, 8], [5, 58, 58, 1]]), torch.tensor([[62, 7, 1], [61, 57, 1]])


def base_of(shape: T5ModelConfig, folder: Path) -> Path:
    hf_format.save(T5(shape).initialise(1), folder)
    return folder


def adapted(base: Path, shape: T5ModelConfig, dtype: torch.dtype = torch.float32) -> T5:
    larger = dataclasses.replace(shape, vocab_size=TOKENS[1] + 1)
    model = hf_format.load(base, dtype, expect=larger, pieces={number: [number % 7 + 2] for number in range(57, 63)})
    add_adapters(model, LORA, 3)
    return model


def moved(model: T5) -> T5:
    for number, weight in enumerate(weight for weight in model.parameters() if weight.requires_grad):
        weight.data.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)), alpha=0.1)
    return model


def logits(model: T5) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(IDS, model.shift_right(LABELS))


@pytest.mark.parametrize(("shape", "dtype"), [(SHAPE, torch.int8), (UNTIED, torch.float32)], ids=["tied", "untied"])
def test_the_engine_forms_the_gradients_of_autograd(tmp_path: Path, shape: T5ModelConfig, dtype: torch.dtype) -> None:
    model, batch = adapted(base_of(shape, tmp_path), shape, dtype), Rectangle(vocab=TOKENS[1] + 1)
    store = weight_store_for(dtype, torch.float32, (model.embedding, model.output_weight))
    loss, expected = autograd_gradients(model, batch)
    total = Blockwise(model, 1, store, LossSettings(), 0.0).gradients(
        batch.micro_batches(model, [[0, 1], [2, 3]]), batch.num_labels
    )
    assert float(total / batch.num_labels) == pytest.approx(float(loss), rel=1e-5)
    assert "token_rows.embedding" in expected and ("token_rows.head" in expected) == (shape is UNTIED)
    for name, grad in expected.items():
        result = model.get_parameter(name).grad
        assert result is not None and relative_error(result, grad) < 1e-4
    assert model.embedding.grad is None


@pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
def test_saved_loaded_and_merged_they_are_the_same(tmp_path: Path, shape: T5ModelConfig) -> None:
    base = base_of(shape, tmp_path / "base")
    model = moved(adapted(base, shape))
    whole, without = logits(model), logits(adapted(base, shape))
    save_adapters(model, LORA, tmp_path / "adapter", str(base), "")
    info = read_info(tmp_path / "adapter")
    assert info.settings.tokens == TOKENS and info.adapted(shape).vocab_size == 63
    other = hf_format.load(base, expect=info.adapted(shape))
    use_adapters(other, *load_adapters(other, tmp_path / "adapter"))
    assert torch.equal(logits(other), whole)
    with adapters_off(model):
        torch.testing.assert_close(logits(model), without, rtol=1e-5, atol=1e-5)
    merge(model)
    torch.testing.assert_close(logits(model), whole, rtol=1e-4, atol=1e-4)
    assert model.token_rows is None and not torch.equal(whole, without)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_gives_the_same_logits(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = base_of(SHAPE, tmp_path / "base")
    model = moved(adapted(base, SHAPE))
    save_adapters(model, LORA, tmp_path / "adapter", str(base), "")
    peer: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(base)
    peer.resize_token_embeddings(63)
    peer = peft.PeftModel.from_pretrained(peer, tmp_path / "adapter").eval()
    with torch.no_grad():
        result = peer(input_ids=IDS, decoder_input_ids=model.shift_right(LABELS)).logits
    torch.testing.assert_close(result, logits(model), rtol=1e-4, atol=1e-4)
