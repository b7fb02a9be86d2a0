from __future__ import annotations

import dataclasses

import pytest
import torch

from model.decoding.decoder import Decoder
from model.decoding.generation import generate
from model.decoding.sampling import AnswerRow, choose
from model.t5 import T5
from settings.declared import GenerateConfig, T5ModelConfig

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


def test_steps_are_the_whole_model(config: T5ModelConfig) -> None:
    """Also past the first buffers, and past the last bucket."""
    model = build(config)
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


@pytest.mark.parametrize(
    "how,expected",
    [
        ({}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_k": 2}, [0, 4 / 7, 3 / 7, 0]),
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
