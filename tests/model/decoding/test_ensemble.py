"""Several models write one answer, against a loop over the whole models that averages their log-probabilities."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from model.decoding.answer_tree import AnswerTree
from model.decoding.decoder import Decoder
from model.decoding.generation import generate, generate_best, write
from model.decoding.sampling import Row
from model.t5 import T5
from settings.declared import GenerateConfig, T5ModelConfig
from tests.model.decoding.test_generation import ROWS, build

LIMIT = 8


@pytest.fixture
def models(config: T5ModelConfig) -> list[T5]:
    """Three that disagree, one of them of another shape."""
    return [build(config, 1), build(config, 2), build(dataclasses.replace(config, d_ff=24, num_decoder_layers=1), 3)]


def ensemble(models: list[T5], num_beams: int = 1) -> Decoder:
    first, *others = models
    return Decoder(first, num_beams=num_beams, others=[Decoder(other, num_beams=num_beams) for other in others])


@torch.no_grad()
def mean_log_probs(models: list[T5], ids: list[int], written: list[int]) -> torch.Tensor:
    """Of the token behind those that are written."""
    logits = [model.logits(torch.tensor([ids]), torch.tensor([[0, *written]]))[0, -1] for model in models]
    return torch.stack([torch.log_softmax(one, 0) for one in logits]).mean(0)


def naive(models: list[T5], ids: list[int]) -> list[int]:
    written = list[int]()
    while len(written) < LIMIT:
        token = int(mean_log_probs(models, ids, written).argmax())
        if token == models[0].config.eos_token_id:
            break
        written.append(token)
    return written


def test_greedy_takes_the_token_of_the_highest_mean(models: list[T5]) -> None:
    settings = GenerateConfig(max_new_tokens=LIMIT)
    answers = write(ensemble(models), [Row(ids, settings) for ids in ROWS])
    assert answers == [naive(models, ids) for ids in ROWS]
    assert answers != generate(models[0], ROWS, settings)


def test_a_search_scores_answers_by_the_mean(models: list[T5]) -> None:
    settings = GenerateConfig(max_new_tokens=3, num_beams=4)
    eos = models[0].config.eos_token_id
    for ids, best in zip(ROWS, generate_best(ensemble(models, 4), ROWS, settings), strict=True):
        for answer in best:
            tokens = [*answer.tokens, eos][:3]
            steps = [mean_log_probs(models, ids, tokens[:at])[token] for at, token in enumerate(tokens)]
            assert answer.log_probability == pytest.approx(float(sum(steps)), abs=1e-4)


def test_a_list_of_answers_is_scored_by_the_mean_over_what_it_allows(models: list[T5]) -> None:
    listed = [list(ids) for ids in itertools.product((4, 9), (5, 6), (7, 8))]
    tree = AnswerTree.build(map(np.array, listed), models[0].config.eos_token_id)
    settings = GenerateConfig(max_new_tokens=4, num_beams=8, length_penalty=0.0)
    (best,) = generate_best(ensemble(models, 8), ROWS[:1], settings, tree)

    def score(answer: list[int]) -> float:
        total = 0.0
        for at, token in enumerate(answer):
            allowed = sorted({other[at] for other in listed if other[:at] == answer[:at]})
            of_each = [mean_log_probs([model], ROWS[0], answer[:at])[allowed] for model in models]
            total += float(sum(torch.log_softmax(one, 0)[allowed.index(token)] for one in of_each)) / len(models)
        return total

    expected = sorted(((score(answer), answer) for answer in listed), reverse=True)
    assert [answer.tokens for answer in best] == [answer for _, answer in expected]
    assert [answer.log_probability for answer in best] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_one_model_twice_draws_as_it_does_once(models: list[T5]) -> None:
    settings = GenerateConfig(max_new_tokens=LIMIT, temperature=1.0)
    twice = write(ensemble([models[0], models[0]]), [Row(ids, settings, 5) for ids in ROWS])
    assert twice == generate(models[0], ROWS, settings, seed=5)


def test_rows_come_and_go_in_all_models(models: list[T5]) -> None:
    decoder = ensemble(models)
    decoder.join([ROWS[0]], LIMIT)
    decoder.step([0])
    decoder.join([ROWS[1], ROWS[0]], LIMIT)
    assert decoder.drop({0}) == [2, 1]
    first = decoder.step([0, 0])
    for row, ids in enumerate((ROWS[0], ROWS[1])):
        torch.testing.assert_close(first[row], mean_log_probs(models, ids, []), rtol=1e-4, atol=1e-4)
