from __future__ import annotations

import numpy as np
import pytest
import torch

from model.decoding.answer_tree import AnswerTree
from model.decoding.decoder import Decoder
from model.decoding.generation import generate, generate_best, stream
from model.t5 import T5
from settings.declared import GenerateConfig, T5ModelConfig

ROWS = [[5, 9, 11, 3, 1], [7, 1], [30, 2, 2, 8, 9, 10, 12, 1]]
END = 1


def some_answers(vocab_size: int, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Different answers of 1 to 4 tokens, many of which begin alike, and some of which others begin with."""
    random = np.random.default_rng(seed)
    kinds = random.integers(2, vocab_size, 5)
    result = dict[tuple[int, ...], None]()
    while len(result) < count:
        result[tuple(int(token) for token in random.choice(kinds, random.integers(1, 5)))] = None
    return list(result)


def tree_of(answers: list[tuple[int, ...]]) -> AnswerTree:
    return AnswerTree.build((np.array(answer, np.int32) for answer in answers), END)


def scored(model: T5, row: list[int], answers: list[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Each answer's log-probability over the tokens that the list allows: the whole model, without any tree."""
    result = dict[tuple[int, ...], float]()
    for answer in answers:
        ended = (*answer, END)
        logits = model.logits(torch.tensor([row]), torch.tensor([[0, *answer]]))[0]
        result[answer] = 0.0
        for position, token in enumerate(ended):
            allowed = sorted(
                {(*other, END)[position] for other in answers if (*other, END)[:position] == ended[:position]}
            )
            log_probs = torch.log_softmax(logits[position, allowed].float(), 0)
            result[answer] += float(log_probs[allowed.index(token)])
    return result


def model_of(config: T5ModelConfig, seed: int) -> T5:
    model = T5(config).initialise(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and name != "embedding":
                weight.mul_(4.0)
    return model


@torch.no_grad()
def test_the_best_are_those_of_all_answers_scored(config: T5ModelConfig) -> None:
    model = model_of(config, 1)
    answers = some_answers(config.vocab_size, 12, 1)
    tree = tree_of(answers)
    for beams in (len(answers), 2 * len(answers)):
        settings = GenerateConfig(num_beams=beams, length_penalty=0.0)
        for row, best in zip(
            ROWS, generate_best(Decoder(model, num_beams=settings.num_beams), ROWS, settings, tree), strict=True
        ):
            expected = scored(model, row, answers)
            assert [tuple(result.tokens) for result in best] == sorted(answers, key=lambda of: -expected[of])
            for result in best:
                assert result.log_probability == pytest.approx(expected[tuple(result.tokens)], abs=1e-3)
    assert sum(map(np.exp, expected.values())) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("how", [{}, {"num_beams": 5, "early_stopping": "True"}, {"temperature": 1.5}])
def test_no_answer_is_outside(config: T5ModelConfig, how: dict[str, float]) -> None:
    """Whatever else is asked for: penalties and the longest length do not apply."""
    model, answers = model_of(config, 0), some_answers(config.vocab_size, 9)
    limits = {"max_new_tokens": 2, "min_new_tokens": 2, "no_repeat_ngram_size": 1, "top_k": 50}
    for tree in (tree_of(answers), tree_of(answers[:1])):
        for seed in range(5):
            result = generate(model, ROWS, tree=tree, seed=seed, **{**limits, **how})
            assert set(map(tuple, result)) <= set(answers)
    assert result == [list(answers[0])] * len(ROWS)
    assert list(
        stream(Decoder(model, num_beams=int(how.get("num_beams", 1))), ROWS[0], GenerateConfig(**how), tree=tree)
    ) == list(answers[0])  # type: ignore[arg-type]
