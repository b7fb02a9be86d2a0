"""Which token comes next? Penalties change the scores, then the likeliest token is taken or one is drawn.

Sources: sampling from the best k: Fan et al. 2018; from the best p: Holtzman et al. 2020 (arXiv 1904.09751); repetition
penalty: Keskar et al. 2019 (arXiv 1909.05858); no repeated n-gram: Paulus et al. 2017 (arXiv 1705.04304).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_TEMPERATURE = 1e-6  # divided by less, scores are out of fp32's range


@dataclass(frozen=True)
class Penalties:
    """What is held against tokens that were written already.

    Args:
        repetition_penalty: scores of such tokens are divided by it where positive, multiplied where negative; 1: off.
        no_repeat_ngram_size: no run of so many tokens comes twice; 0: off.
        min_new_tokens: the end token is not allowed before so many others.
        eos_token_id: the end token.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    eos_token_id: int = 1

    @property
    def need_history(self) -> bool:
        """Whether the tokens written so far matter."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram_size > 0

    def __call__(self, scores: Tensor, written: Tensor | None, count: int) -> Tensor:
        """Change scores (B, V) fp32, in place.

        Args:
            written: (B, count + 1) int64, the start token and those written so far; None if no history is needed.
            count: tokens written so far.
        """
        if self.repetition_penalty != 1.0:
            assert written is not None
            seen = scores.gather(1, written)
            changed = torch.where(seen < 0, seen * self.repetition_penalty, seen / self.repetition_penalty)
            scores.scatter_(1, written, changed)
        if 0 < self.no_repeat_ngram_size <= count + 1:
            assert written is not None
            self._ban_repeats(scores, written)
        if count < self.min_new_tokens:
            scores[:, self.eos_token_id] = -torch.inf
        return scores

    def _ban_repeats(self, scores: Tensor, written: Tensor) -> None:
        """A token that would complete a run which was there before gets -inf."""
        size = self.no_repeat_ngram_size
        runs = written.unfold(1, size, 1)  # (B, runs, size)
        begun = written[:, written.shape[1] + 1 - size :]
        row, run = (runs[:, :, :-1] == begun.unsqueeze(1)).all(2).nonzero(as_tuple=True)
        scores[row, runs[row, run, -1]] = -torch.inf


@dataclass(frozen=True)
class Choice:
    """How one of the scored tokens is chosen.

    Args:
        temperature: 0, or next to it: the likeliest token; above: sampled from softmax(scores / temperature).
        top_k: sample from this many best tokens only; 0: from all.
        top_p: sample from the fewest best tokens that hold this probability, 0 (exclusive) to 1.
        seed: fixes the random numbers. Each row draws its own, from the seed and its input, so that its text does not
            depend on the rows beside it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def generator(self, ids: Sequence[int]) -> torch.Generator:
        """The random numbers of one row."""
        digest = hashlib.blake2b(repr((self.seed, list(ids))).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def __call__(self, scores: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Choose one token a row: scores (B, V) fp32 -> (B,) int64."""
        if self.temperature < LEAST_TEMPERATURE:
            return scores.argmax(1)
        draws = torch.stack([torch.rand(1, generator=generator) for generator in generators]).to(scores.device)
        if self.top_p == 1.0 and not self.top_k:  # nothing has to be sorted
            mass = _mass(scores - scores.amax(1, keepdim=True), self.temperature)
            return _place(mass, draws * mass[:, -1:]).squeeze(1)
        count = min(self.top_k or scores.shape[1], scores.shape[1])
        best, tokens = scores.topk(count, 1)  # best first
        mass = _mass(best - best[:, :1], self.temperature)
        # the tokens before which less than top_p has gathered; always the first
        before = torch.cat([mass.new_zeros(len(mass), 1), mass[:, :-1]], 1)
        last = (before < self.top_p * mass[:, -1:]).sum(1, keepdim=True) - 1
        return tokens.gather(1, torch.minimum(_place(mass, draws * mass.gather(1, last)), last)).squeeze(1)


def _mass(scores: Tensor, temperature: float) -> Tensor:
    """Probability gathered up to each token: (B, count) of scores whose highest is 0."""
    return torch.softmax(scores / temperature, 1).cumsum(1)


def _place(mass: Tensor, draws: Tensor) -> Tensor:
    """(B, 1): the first token by which more than the draw has gathered."""
    return torch.searchsorted(mass, draws, right=True).clamp_(max=mass.shape[1] - 1)
