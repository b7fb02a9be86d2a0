from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from model.decoding.decoder import Decoder
from model.decoding.generation import generate
from model.decoding.sampling import AnswerRow, choose, penalise
from model.quantization import dequantize, quantize_model
from model.t5 import T5
from settings.declared import GenerateConfig, T5ModelConfig
from settings.errors import UserError

ROWS = [[5, 9, 11, 3, 1], [7, 1], [30, 2, 2, 8, 9, 10, 12, 1]]


SEEDS: dict[str, int] = {}  # shape -> the first seed that `lively` found for it


def build(config: T5ModelConfig, seed: int = 0, **changes: object) -> T5:
    """A model with opinions: weights a few times as large as at the start of training."""
    model = T5(dataclasses.replace(config, **changes)).initialise(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and name != "embedding":
                weight.mul_(4.0)
    return model


def naive(model: T5, ids: list[int], max_new_tokens: int) -> list[int]:
    """Greedy without any cache: the whole model again for each token."""
    written = [0]
    for _ in range(max_new_tokens):
        token = int(model.logits(torch.tensor([ids]), torch.tensor([written]))[0, -1].argmax())
        if token == model.config.eos_token_id:
            break
        written.append(token)
    return written[1:]


def lively(config: T5ModelConfig, **changes: object) -> T5:
    """A model whose answers to ROWS are not all of one length, nor all cut off."""
    shape = repr(dataclasses.replace(config, **changes))
    for seed in [SEEDS[shape]] if shape in SEEDS else range(200):
        model = build(config, seed, **changes)
        lengths = {len(answer) for answer in generate(model, ROWS, max_new_tokens=12)}
        if len(lengths) == 3 and max(lengths) > 4:
            SEEDS[shape] = seed
            return model
    raise AssertionError("no seed gives answers of three lengths")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias_in_every_layer": True, "feed_forward_proj": "gated-gelu"},
        {"tie_word_embeddings": False, "scale_decoder_outputs": False},
    ],
)
def test_greedy_is_the_naive_way(config: T5ModelConfig, changes: dict[str, object]) -> None:
    model = lively(config, **changes)
    answers = generate(model, ROWS, max_new_tokens=12)
    assert answers == [naive(model, row, 12) for row in ROWS]
    assert all(model.config.eos_token_id not in answer for answer in answers)


@pytest.mark.parametrize("every_layer", [False, True])
def test_steps_are_the_whole_model(config: T5ModelConfig, every_layer: bool) -> None:
    """Also past the first buffers, and past the last bucket."""
    model = build(config, bias_in_every_layer=every_layer)
    written = torch.randint(2, config.vocab_size, (3, 150), generator=torch.Generator().manual_seed(1))
    ids = torch.zeros(3, 8, dtype=torch.long)
    for row, tokens in enumerate(ROWS):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    expected = model.logits(ids, written, (ids > 0).long())
    decoder = Decoder(model)
    decoder.join(ROWS, 150)
    for position in range(150):
        logits = decoder.step(written[:, position])
        torch.testing.assert_close(logits, expected[:, position], rtol=1e-3, atol=1e-3)


def test_the_seed_fixes_sampling(config: T5ModelConfig) -> None:
    model = build(config)
    first = generate(model, ROWS, max_new_tokens=12, temperature=1.0, seed=1)
    torch.manual_seed(99)
    assert generate(model, ROWS, max_new_tokens=12, temperature=1.0, seed=1) == first
    assert generate(model, ROWS, max_new_tokens=12, temperature=1.0, seed=2) != first


@pytest.mark.parametrize(
    "how,expected",
    [
        ({}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_k": 2}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 4 / 9, 3 / 9, 2 / 9]),
        ({"top_p": 0.7}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 3 / 7, 0]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 9 / 30, 4 / 30]),
    ],
)
def test_sampled_shares(how: dict[str, float], expected: list[float]) -> None:
    draws, settings = 4000, GenerateConfig(**{"temperature": 1.0, **how})  # type: ignore[arg-type]
    logits = torch.tensor([0.1, 0.4, 0.3 - 1e-7, 0.2]).log().expand(draws, -1)
    tokens = choose(logits, settings, [AnswerRow([row], settings).generator for row in range(draws)])
    shares = torch.bincount(tokens, minlength=4) / draws
    assert shares.tolist() == pytest.approx(expected, abs=0.04)
    assert [share > 0 for share in shares.tolist()] == [share > 0 for share in expected]


@pytest.mark.parametrize("foreign", [37])
def test_foreign_token_is_named(config: T5ModelConfig, foreign: int) -> None:
    with pytest.raises(UserError, match=rf"token id {foreign}, .*0 to 36.*tokenizer"):
        generate(build(config), [[5, 1], [foreign, 1]], max_new_tokens=3)


@contextmanager
def widened(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context in which the weights are fp32."""
    narrow = [(weight, weight.data) for weight in weights]
    for weight, data in narrow:
        weight.data = data.float()
    yield
    for weight, data in narrow:
        weight.data = data


@pytest.mark.parametrize("tied", [False])
def test_bf16_weights_widened_while_a_block_runs(config: T5ModelConfig, tied: bool) -> None:
    wide = lively(config, tie_word_embeddings=tied)
    narrow = T5(wide.config, dtype=torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    wide.load_state_dict(narrow.state_dict())  # the same rounded values
    before = {name: weight.dtype for name, weight in narrow.named_parameters()}
    decoders = Decoder(narrow, widened, torch.float32), Decoder(wide)
    for decoder in decoders:
        decoder.join(ROWS, 12)
    ours, peer = (decoder.step([0, 0, 0]) for decoder in decoders)
    torch.testing.assert_close(ours, peer, rtol=1e-5, atol=1e-5)
    answers = generate(narrow, ROWS, max_new_tokens=12, with_weights=widened, compute_dtype=torch.float32)
    assert answers == generate(wide, ROWS, max_new_tokens=12)
    assert {name: weight.dtype for name, weight in narrow.named_parameters()} == before


def test_one_beam_or_many_equal_beams_are_greedy(config: T5ModelConfig) -> None:
    """Beams that all follow the first one see its tokens, past the first buffers too."""
    model = build(config)
    written = torch.randint(2, config.vocab_size, (3, 130), generator=torch.Generator().manual_seed(2))
    single, several = Decoder(model), Decoder(model, num_beams=3)
    for decoder in (single, several):
        decoder.join(ROWS, 130)
    for position in range(130):
        expected = single.step(written[:, position])
        tokens = torch.stack([written[:, position], torch.full((3,), 5), torch.full((3,), 6)], 1)
        logits = several.step(tokens.flatten()).view(3, 3, -1)
        torch.testing.assert_close(logits[:, 0], expected, rtol=1e-4, atol=1e-4)
        several.cache.follow(torch.zeros(3, 3, dtype=torch.long))


@pytest.mark.parametrize("num_beams", [3])
def test_int8_weights_write_what_their_widened_form_writes(config: T5ModelConfig, num_beams: int) -> None:
    narrow = lively(config)
    quantize_model(narrow)
    wide = T5(config)
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            weight.copy_(dequantize(narrow.get_parameter(name), torch.float32))
    answers = generate(narrow, ROWS, compute_dtype=torch.float32, max_new_tokens=12, num_beams=num_beams)
    assert answers == generate(wide, ROWS, max_new_tokens=12, num_beams=num_beams)


def test_penalties_by_hand() -> None:
    written = torch.tensor([[0, 3, 1, 3]])

    def changed(**how: float) -> list[float]:
        settings = GenerateConfig(**how)  # type: ignore[arg-type]
        (row,) = penalise(torch.tensor([[2.0, -1.0, 0.5, 3.0]]), written, settings, 2).tolist()
        return row

    assert changed(repetition_penalty=2.0) == [1.0, -2.0, 0.5, 1.5]
    assert changed(no_repeat_ngram_size=2) == [2.0, -torch.inf, 0.5, 3.0], "3 was followed by 1"
    assert changed(min_new_tokens=4) == [2.0, -1.0, -torch.inf, 3.0]
    assert changed(min_new_tokens=3) == changed()
