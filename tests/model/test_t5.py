from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from config import T5ModelConfig
from model.loss import IGNORED
from model.t5 import T5


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


def test_shapes(variant: T5ModelConfig) -> None:
    model = T5(variant).initialise(0)
    ids, mask, labels = batch(variant.vocab_size)
    logits = model.logits(ids, model.shift_right(labels), mask)
    assert logits.shape == (3, 6, variant.vocab_size) and logits.dtype == torch.float32
    assert model(ids, mask, labels).shape == ()
    inner = variant.num_heads * variant.d_kv
    assert model.encoder.blocks[0].attention.q.weight.shape == (inner, variant.d_model)
    assert model.decoder.blocks[0].cross_attention.o.weight.shape == (variant.d_model, inner)
    tables = [name for name, _ in model.named_parameters() if name.endswith("bias.table")]
    blocks = variant.num_layers + variant.num_decoder_layers
    assert len(tables) == (blocks if variant.bias_in_every_layer else 2)


def test_every_weight_gets_a_gradient(variant: T5ModelConfig) -> None:
    model = T5(variant).initialise(0)
    model(*batch(variant.vocab_size)).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name


def test_initial_deviations() -> None:
    config = T5ModelConfig(
        vocab_size=500,
        d_model=128,
        d_kv=16,
        d_ff=320,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=12,
        relative_attention_num_buckets=64,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        initializer_factor=0.5,
    )
    expected = {
        "embedding": 1.0,
        "head": 128**-0.5,
        "q": (128 * 16) ** -0.5,
        "k": 128**-0.5,
        "v": 128**-0.5,
        "o": (12 * 16) ** -0.5,
        "gate": 128**-0.5,
        "wi": 128**-0.5,
        "wo": 320**-0.5,
        "bias": 128**-0.5,
    }
    seen = set()
    for name, weight in T5(config).initialise(1).named_parameters():
        if "norm" in name:
            assert (weight == 1).all()
            continue
        kind = name.split(".")[-2] if "." in name else name
        seen.add(kind)
        tolerance = 5 / weight.numel() ** 0.5
        assert weight.std().item() == pytest.approx(0.5 * expected[kind], rel=tolerance), name
        assert abs(weight.mean().item()) < 0.5 * expected[kind] * tolerance, name
    assert seen == set(expected)


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


def test_tied_head_is_the_embedding(config: T5ModelConfig) -> None:
    model = T5(config)
    assert model.output_weight is model.embedding
    assert model.output_scale == config.d_model**-0.5
    untied = T5(dataclasses.replace(config, tie_word_embeddings=False, scale_decoder_outputs=False))
    assert untied.output_weight is untied.head
    assert untied.output_scale == 1.0


def test_padding_changes_nothing(variant: T5ModelConfig) -> None:
    model = T5(variant).initialise(0)
    ids, mask, labels = batch(variant.vocab_size)
    whole = model.logits(ids, model.shift_right(labels), mask)
    alone = model.logits(ids[1:2, :4], model.shift_right(labels[1:2]))
    torch.testing.assert_close(whole[1:2], alone, rtol=1e-4, atol=1e-5)
    ids[1, 4:] = 7
    assert torch.equal(model.logits(ids, model.shift_right(labels), mask), whole)


def test_decoder_does_not_look_ahead(variant: T5ModelConfig) -> None:
    model = T5(variant).initialise(0)
    ids, mask, labels = batch(variant.vocab_size)
    decoder_ids = model.shift_right(labels)
    before = model.logits(ids, decoder_ids, mask)
    decoder_ids[:, 4:] = 3
    after = model.logits(ids, decoder_ids, mask)
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(after[:, 4:], before[:, 4:])


def test_shift_right(config: T5ModelConfig) -> None:
    labels = torch.tensor([[5, 6, 1], [7, IGNORED, IGNORED]])
    assert T5(config).shift_right(labels).tolist() == [[0, 5, 6], [0, 7, 0]]


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


def test_a_loss_needs_labels(config: T5ModelConfig) -> None:
    with pytest.raises(ValueError, match="labels"):
        T5(config).initialise(0)(torch.full((1, 3), 4))
