"""The next token: penalties change the scores, then the likeliest token is taken or one is drawn.

Sources: sampling from the best k: Fan et al. 2018; from the best p: Holtzman et al. 2020 (arXiv 1904.09751); repetition
penalty: Keskar et al. 2019 (arXiv 1909.05858); no repeated n-gram: Paulus et al. 2017 (arXiv 1705.04304).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.decoding.answer_tree import ROOT, Choices
from settings.declared import GenerateConfig, T5ModelConfig

LEAST_TEMPERATURE = 1e-6  # Divided by less, scores are out of fp32's range.


@dataclass
class AnswerRow:
    """One answer that is being written.

    Args:
        ids: of its prompt, with the end token. settings: how its tokens are chosen. seed: fixes the random numbers.
            Each row draws its own, from the seed and its prompt, so that its text does not depend on the rows beside
            it.
        tokens: written so far, without the start token. node: where they end in a tree of answers.
    """

    ids: Sequence[int]
    settings: GenerateConfig
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    node: int = ROOT

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(repr((self.seed, list(self.ids))).encode(), digest_size=8).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def next_tokens(
    rows: Sequence[AnswerRow], logits: Tensor, shape: T5ModelConfig, choices: Choices | None = None
) -> list[int]:
    """The next token of each row, as it would be chosen were it alone: from logits (n, V) fp32, which are changed.

    Args:
        choices: of all rows, whose logits are (n, W); their nodes go on, and no penalty applies.
    """
    alike: dict[tuple[GenerateConfig, int], list[int]] = {}
    for index, row in enumerate(rows):
        settings = row.settings
        count = len(row.tokens)
        is_penalised = (
            settings.repetition_penalty != 1.0 or settings.no_repeat_ngram_size > 0 or count < settings.min_new_tokens
        )
        alike.setdefault((settings, count if is_penalised and choices is None else -1), []).append(index)
    chosen = [0] * len(rows)
    for (settings, count), indices in alike.items():
        scores = logits if len(alike) == 1 else logits[indices]
        if count >= 0:
            written = [[shape.start_token_id, *rows[index].tokens] for index in indices]
            penalise(scores, torch.tensor(written, device=logits.device), settings, shape.eos_token_id)
        tokens = choose(scores, settings, [rows[index].generator for index in indices])
        for index, token in zip(indices, tokens.tolist(), strict=True):
            if choices is not None:
                column = min(token, int(choices.counts[index]) - 1)  # Rounding may draw what has no mass.
                rows[index].node = int(choices.first[index]) + column
                token = int(choices.tokens[index, column])
            chosen[index] = token
    return chosen


def penalise(scores: Tensor, written: Tensor, settings: GenerateConfig, eos_token_id: int) -> Tensor:
    """Change scores (B, V) fp32 in place, by the tokens that were written: (B, count + 1) int64, the start token
    first.
    """
    penalty = settings.repetition_penalty
    size = settings.no_repeat_ngram_size
    count = written.shape[1] - 1
    if penalty != 1.0:
        before = scores.gather(1, written)
        scores.scatter_(1, written, torch.where(before < 0, before * penalty, before / penalty))
    if 0 < size <= count + 1:  # A token may not complete a run that was there before.
        runs = written.unfold(1, size, 1)  # (B, runs, size)
        beginning = written[:, count + 2 - size :]
        row, run = (runs[:, :, :-1] == beginning.unsqueeze(1)).all(2).nonzero(as_tuple=True)
        scores[row, runs[row, run, -1]] = -torch.inf
    if count < settings.min_new_tokens:
        scores[:, eos_token_id] = -torch.inf
    return scores


def choose(scores: Tensor, settings: GenerateConfig, generators: Sequence[torch.Generator]) -> Tensor:
    """One token a row: scores (B, V) fp32 -> (B,) int64; drawn from softmax(scores / temperature), or the likeliest at
    0.
    """
    temperature = settings.temperature
    top_k = settings.top_k
    top_p = settings.top_p
    if temperature < LEAST_TEMPERATURE:
        return scores.argmax(1)
    draws = torch.stack([torch.rand(1, generator=generator) for generator in generators]).to(scores.device)
    if top_p == 1.0 and not top_k:  # Nothing has to be sorted.
        mass = _mass(scores - scores.amax(1, keepdim=True), temperature)
        return _place(mass, draws * mass[:, -1:]).squeeze(1)
    best, tokens = scores.topk(min(top_k or scores.shape[1], scores.shape[1]), 1)
    mass = _mass(best - best[:, :1], temperature)
    # Those may be drawn before which less than top_p has gathered: always the first.
    before = torch.cat([mass.new_zeros(len(mass), 1), mass[:, :-1]], 1)
    last = (before < top_p * mass[:, -1:]).sum(1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(_place(mass, draws * mass.gather(1, last)), last)).squeeze(1)


def _mass(scores: Tensor, temperature: float) -> Tensor:
    """Probability gathered up to each token: (B, count) of scores whose highest is 0."""
    return torch.softmax(scores / temperature, 1).cumsum(1)


def _place(mass: Tensor, draws: Tensor) -> Tensor:
    """(B, 1): the first token by which more than the draw has gathered."""
    return torch.searchsorted(mass, draws, right=True).clamp_(max=mass.shape[1] - 1)
