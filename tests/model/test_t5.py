from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from model.loss import IGNORED
from model.t5 import T5
from settings.declared import T5ModelConfig


def batch(vocab_size: int, rows: int = 3, source: int = 9, target: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, vocab_size, (rows, source), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    labels = torch.randint(2, vocab_size, (rows, target), generator=generator)
    labels[2, 3:] = IGNORED
    return ids, mask, labels


VARIANTS = {
    "t5": {},
    "v1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "scale_decoder_outputs": False},
    "umt5": {"feed_forward_proj": "gated-gelu", "bias_in_every_layer": True},
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, config: T5ModelConfig) -> T5ModelConfig:
    return dataclasses.replace(config, **VARIANTS[request.param])


def test_initial_values_depend_on_the_seed_alone(config: T5ModelConfig) -> None:
    model, again, other = T5(config).initialise(3), T5(config).initialise(3), T5(config).initialise(4)
    half = T5(config, dtype=torch.bfloat16).initialise(3)
    for (name, weight), same, narrow in zip(
        model.named_parameters(), again.parameters(), half.parameters(), strict=True
    ):
        assert torch.equal(weight, same)
        kept_wide = "norm" in name or "table" in name
        assert narrow.dtype == (torch.float32 if kept_wide else torch.bfloat16), name
        assert torch.equal(narrow, weight.to(narrow.dtype))
    assert not torch.equal(model.embedding, other.embedding)
    assert not torch.equal(model.encoder.blocks[0].attention.k.weight, model.encoder.blocks[1].attention.k.weight)


def test_padding_changes_nothing(variant: T5ModelConfig) -> None:
    model = T5(variant).initialise(0)
    ids, mask, labels = batch(variant.vocab_size)
    whole = model.logits(ids, model.shift_right(labels), mask)
    alone = model.logits(ids[1:2, :4], model.shift_right(labels[1:2]))
    torch.testing.assert_close(whole[1:2], alone, rtol=1e-4, atol=1e-5)
    ids[1, 4:] = 7
    assert torch.equal(model.logits(ids, model.shift_right(labels), mask), whole)


def test_dropout_in_training_alone(config: T5ModelConfig) -> None:
    model = T5(dataclasses.replace(config, dropout_rate=0.2)).initialise(0)
    inputs = batch(config.vocab_size)
    torch.manual_seed(0)
    first, second = model(*inputs).item(), model(*inputs).item()
    torch.manual_seed(0)
    assert model(*inputs).item() == first != second
    model.eval()
    assert model(*inputs).item() == model(*inputs).item()


@pytest.mark.parametrize("row", [[1, 0, 1]])
def test_mask_of_another_form_is_refused(config: T5ModelConfig, row: list[int]) -> None:
    ids, labels = torch.full((2, 3), 4), torch.full((2, 2), 4)
    with pytest.raises(ValueError, match="ones, then zeros"):
        T5(config).initialise(0)(ids, torch.tensor([[1, 1, 1], row]), labels)
