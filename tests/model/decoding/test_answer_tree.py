from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from common.storage import NotMade, only_if_made, read_once_made
from model.decoding.answer_tree import AnswerTree, Choices
from model.decoding.decoder import Decoder
from model.decoding.generation import generate, generate_best, stream
from model.quantization import quantize_model
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


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 2}, {"num_beams": 5, "early_stopping": "True"}, {"temperature": 1.5}]
)
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


def test_drawn_answers_have_the_shares_of_their_probabilities(config: T5ModelConfig) -> None:
    model, answers, draws = model_of(config, 0), some_answers(config.vocab_size, 5), 1500
    tree, row = tree_of(answers), ROWS[0]
    with torch.no_grad():
        expected = scored(model, row, answers)
    drawn = [tuple(generate(model, [row], tree=tree, temperature=1.0, seed=seed)[0]) for seed in range(draws // 10)]
    for answer in answers:
        assert drawn.count(answer) / len(drawn) == pytest.approx(np.exp(expected[answer]), abs=0.15)


def test_the_head_may_be_computed_whole_and_in_int8(config: T5ModelConfig) -> None:
    """Where most tokens are allowed the whole head is computed, else only their rows: with the same answers."""
    model = model_of(config, 0)
    every = [(token,) for token in range(2, config.vocab_size)]
    settings = GenerateConfig(num_beams=4)
    few = [(token,) for token in range(2, config.vocab_size // 4)]
    for quantized in (False, True):
        if quantized:
            quantize_model(model)
        whole, part = (
            generate_best(Decoder(model, num_beams=settings.num_beams), ROWS, settings, tree_of(of))
            for of in (every, few)
        )
        for best, best_of_few in zip(whole, part, strict=True):
            inside = [result.tokens for result in best if tuple(result.tokens) in few]
            assert [result.tokens for result in best_of_few][: len(inside)] == inside


def test_a_tree_of_many_answers_is_small(tmp_path: Path) -> None:
    random, count = np.random.default_rng(0), 100_000
    ids = random.integers(2, 32_128, (count, 6)) // np.array([1000, 100, 10, 1, 1, 1])
    tree = AnswerTree.build(ids.astype(np.int32) + 2, END)
    assert tree.num_bytes < 100 * count  # a million in 100 MB
    tree.save(tmp_path / "tree.npz")
    loaded = AnswerTree.load(tmp_path / "tree.npz")
    assert (loaded.tokens == tree.tokens).all() and (loaded.starts == tree.starts).all() and loaded.longest == 7
    nodes = np.zeros(count, np.int64)
    for position in range(7):
        choices = loaded.choices(nodes[:50], 40_000)
        expected_tokens = ids[:50, position] + 2 if position < 6 else np.full(50, END)
        columns = (choices.tokens == expected_tokens[:, None]).argmax(1)
        assert (choices.tokens[np.arange(50), columns] == expected_tokens).all()
        nodes[:50] = choices.first + columns


def test_an_answer_with_the_end_token_inside_is_refused() -> None:
    for answers in ([], [np.array([5, END, 6])]):
        with pytest.raises(ValueError):
            AnswerTree.build(answers, END)


def test_what_is_certain_is_not_computed(config: T5ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tokens that must follow, nor beams that do not go on."""
    model, steps = model_of(config, 0), list[int]()
    step = Decoder.step

    def counted(decoder: Decoder, ids: Sequence[int] | torch.Tensor, choices: Choices | None = None) -> torch.Tensor:
        steps.append(len(ids))
        return step(decoder, ids, choices)

    monkeypatch.setattr(Decoder, "step", counted)
    tree = tree_of([(5, 6, 7), (5, 8, 9), (10, 11, 12)])
    assert [5, 8, 9, END] in tree and [5, 8, 9] not in tree and [5, 9, 9, END] not in tree and [99] not in tree
    assert tree.tail(0) == [] and tree.tail(2) == [11, 12, END]
    assert generate(model, ROWS[:1], tree=tree_of([(5, 6, 7), (10, 11, 12)]))[0] in ([5, 6, 7], [10, 11, 12])
    assert steps == [1]
    steps.clear()
    best = generate_best(Decoder(model, num_beams=8), ROWS, GenerateConfig(num_beams=8, length_penalty=0.0), tree)
    assert [len(result) for result in best] == [3] * len(ROWS) and steps == [len(ROWS), len(ROWS)]


def test_a_damaged_list_in_the_cache_is_made_anew(tmp_path: Path) -> None:
    tree = tree_of([(5, 6), (7,), (5, 8, 9)])
    target = tmp_path / "tree.npz"
    read_once_made(target, tree.save, AnswerTree.load)
    whole = target.read_bytes()
    foreign = tmp_path / "foreign.npz"
    np.savez(foreign, tokens=tree.tokens, starts=tree.starts[::-1], longest=np.array(3))
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 1
    for content in (b"", b"evil", whole[:-40], bytes(flipped), foreign.read_bytes()):
        target.write_bytes(content)
        assert read_once_made(target, tree.save, AnswerTree.load).num_answers == 3
        with pytest.raises(NotMade):
            target.write_bytes(content)
            read_once_made(target, tree.save, AnswerTree.load, only_if_made)
