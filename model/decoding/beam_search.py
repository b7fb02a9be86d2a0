"""Beam search: the likeliest of all answers is looked for by letting the best few beginnings grow side by side.

At each step every beginning of a prompt meets every token; the best 2G of these are looked at, so that G remain even if
all others end. One that ends among the best G is an answer, and the best G answers are kept. An answer's score is the
sum of its log-probabilities over its length to the power of `length_penalty`. A prompt is done when its best beginning
cannot beat the worst of G answers, as far as `early_stopping` wants that proven. Answers are those of Hugging Face's
search, token by token; there a batch continues until its last prompt is done, here each prompt leaves when it is.

With a list of answers only the beams that go on are computed, and one that only one answer goes on from ends with it:
the other tokens are certain.

Shapes: B prompts, G beams, the first g of which go on, V vocabulary. Source: transformers 5.23, `_beam_search`; Wu et
al. 2016 (arXiv 1609.08144).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.decoding.answer_tree import DEAD, ROOT, AnswerTree, Choices
from model.decoding.decoder import Decoder
from model.decoding.sampling import penalise
from settings.declared import GenerateConfig

OUT = -1.0e9  # The score of what is out of the race; it is finite, so that sums stay numbers.


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer, and the sum of its tokens' log-probabilities; with a list of answers, over the tokens that it
    allows.
    """

    tokens: list[int]
    log_probability: float


class _Candidates(NamedTuple):
    """The best of all beginnings that are one token longer, best first, each (B, 2G); with a list of answers also where
    they stand in its tree.
    """

    parents: Tensor
    tokens: Tensor
    scores: Tensor
    ends: Tensor  # True: it is an answer.
    counts: Tensor | int  # The tokens of the answer, the end token included.
    nodes: Tensor  # The node of a beginning, the leaf of an answer.


class _Search:
    """Beginnings that grow, from the start token on, and answers; with a list of answers also their nodes in its
    tree.
    """

    def __init__(self, settings: GenerateConfig, rows: int, start: int, device: torch.device, is_listed: bool) -> None:
        beams = settings.num_beams
        self.settings = settings
        self.is_listed = is_listed
        self.written = torch.full((rows, beams, 1), start, device=device)
        self.scores = torch.full((rows, beams), OUT, device=device)
        self.scores[:, 0] = 0.0  # All beginnings are alike yet: one is enough.
        self.nodes = torch.full((rows, beams), ROOT, device=device)
        if is_listed:
            self.scores[:, 1:] = -torch.inf
            self.nodes[:, 1:] = DEAD
        self.answers = self.written.clone()
        self.leaves = self.nodes.clone()
        self.answer_scores = torch.full((rows, beams), OUT, device=device)
        self.is_answer = torch.zeros((rows, beams), dtype=torch.bool, device=device)
        self.is_open = torch.ones((rows, 1), dtype=torch.bool, device=device)  # False: no better answer may come.

    def candidates(self, log_probs: Tensor, eos: int) -> _Candidates:
        """Of all tokens: log_probs (B G, V)."""
        beams = self.settings.num_beams
        count = self.written.shape[2]
        totals = log_probs.view(-1, beams, log_probs.shape[1]).add_(self.scores.unsqueeze(2))
        parents, tokens, best = _best(totals, 2 * beams)
        ends = tokens == eos if count < self.settings.max_new_tokens else torch.ones_like(tokens, dtype=torch.bool)
        return _Candidates(parents, tokens, best, ends, count, self.nodes.gather(1, parents))

    def listed_candidates(self, log_probs: Tensor, choices: Choices, tree: AnswerTree, width: int) -> _Candidates:
        """Of the allowed tokens: log_probs (k, W) of k of the first `width` beams of each prompt; scores are -inf where
        there are fewer.
        """
        beams = self.settings.num_beams
        device = log_probs.device
        rows, first, tokens = (
            torch.from_numpy(ids).to(device) for ids in (choices.rows, choices.first, choices.tokens)
        )
        rows = rows // width * beams + rows % width
        totals = log_probs.add_(self.scores.flatten()[rows].unsqueeze(1))
        scores, columns = totals.topk(min(2 * beams, totals.shape[1]), 1)
        count = scores.shape[1]

        def spread(values: Tensor, empty: float) -> Tensor:
            """(k, count) of some beams -> (B, G 2G) of all; 2G as a beam may have less."""
            all_ = values.new_full((self.scores.numel(), 2 * beams), empty)
            all_[rows, :count] = values
            return all_.view(-1, 2 * beams * beams)

        best, indices = spread(scores, -torch.inf).topk(2 * beams)
        ids = spread(tokens.gather(1, columns), 0).gather(1, indices).clamp_(min=0)
        nodes = spread(first.unsqueeze(1) + columns, DEAD).gather(1, indices)
        nodes.masked_fill_(best == -torch.inf, DEAD)
        arrays = tree.leaves(nodes.flatten().cpu().numpy())
        leaves, tails = (torch.from_numpy(array).to(device).view_as(nodes) for array in arrays)
        ends = leaves != DEAD
        counts = self.written.shape[2] + tails
        return _Candidates(indices // (2 * beams), ids, best, ends, counts, torch.where(ends, leaves, nodes))

    def advance(self, candidates: _Candidates) -> Tensor:
        """Grow by one token -> parents (B, G) of the new beginnings."""
        settings = self.settings
        beams = settings.num_beams
        count = self.written.shape[2]
        parents, tokens, best, ends, counts, nodes = candidates
        before = torch.take_along_dim(self.written, parents.unsqueeze(2), 1)
        grown = torch.cat([before, tokens.unsqueeze(2)], 2)  # (B, 2G, count + 1)
        self._keep_best_answers(grown, best / counts**settings.length_penalty, ends, nodes)
        going = best.masked_fill(ends, -torch.inf)
        chosen = going.topk(beams)[1]
        self.written = torch.take_along_dim(grown, chosen.unsqueeze(2), 1)
        self.scores = going.gather(1, chosen)
        self.nodes = nodes.gather(1, chosen).masked_fill(self.scores == -torch.inf, DEAD)
        far = settings.early_stopping == "never" and settings.length_penalty > 0.0
        reachable = self.scores[:, :1] / (settings.max_new_tokens if far else count) ** settings.length_penalty
        worst = torch.where(self.is_answer, self.answer_scores.amin(1, keepdim=True), OUT)
        self.is_open = self.is_open & (reachable > worst).any(1, keepdim=True)
        return parents.gather(1, chosen)

    def _keep_best_answers(self, grown: Tensor, scores: Tensor, ends: Tensor, nodes: Tensor) -> None:
        """The best G of the answers so far and of those that end now."""
        beams = self.settings.num_beams
        counts = ends.clone()
        if not self.is_listed:
            counts[:, beams:] = False
        is_full = self.is_answer.all(1, keepdim=True) & (self.settings.early_stopping == "True")
        scores = scores + is_full.float() * OUT + (~self.is_open).float() * OUT + (~counts).float() * OUT
        merged = torch.cat([self.answer_scores, scores], 1)
        best = merged.topk(beams)[1]
        self.answers = torch.cat([self.answers, self.answers.new_zeros(*self.answers.shape[:2], 1)], 2)
        self.answers = torch.take_along_dim(torch.cat([self.answers, grown], 1), best.unsqueeze(2), 1)
        self.answer_scores = merged.gather(1, best)
        self.is_answer = torch.cat([self.is_answer, counts], 1).gather(1, best)
        self.leaves = torch.cat([self.leaves, nodes], 1).gather(1, best)

    def done(self) -> list[bool]:
        """Of each prompt, whether it needs no further step."""
        if self.written.shape[2] > self.settings.max_new_tokens:
            return [True] * len(self.written)
        full = self.is_answer.all(1) & (self.settings.early_stopping == "True")
        done: list[bool] = (full | ~self.is_open.squeeze(1)).tolist()
        return done

    def best_answers(self, row: int, eos: int, tree: AnswerTree | None) -> list[ScoredAnswer]:
        """The answers to one prompt, best first."""
        answers = list[ScoredAnswer]()
        is_answer = self.is_answer[row].tolist()
        scores = self.answer_scores[row].tolist()
        for beam, tokens in enumerate(self.answers[row, :, 1:].tolist()):
            if beam and not is_answer[beam]:
                continue
            if tree is not None:
                tokens = tree.answer(int(self.leaves[row, beam]))
            if eos in tokens:
                tokens = tokens[: tokens.index(eos)]
                count = len(tokens) + 1
            else:
                tokens = tokens[: self.settings.max_new_tokens]
                count = len(tokens)
            answers.append(ScoredAnswer(tokens, scores[beam] * count**self.settings.length_penalty))
        return answers

    def select(self, rows: list[int]) -> None:
        """Continue with these prompts."""
        for name in ("written", "scores", "nodes", "leaves", "answers", "answer_scores", "is_answer", "is_open"):
            setattr(self, name, getattr(self, name)[rows])


def _best(totals: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best of all scores of a prompt: (B, G, V) -> beams, tokens and scores, each (B, count), best first.

    First those of each beam: the sort of a CPU pairs every score that it looks at with its place, four times as large.
    """
    scores, tokens = totals.topk(min(count, totals.shape[2]), 2)
    best, indices = scores.flatten(1).topk(count)
    return indices // scores.shape[2], tokens.flatten(1).gather(1, indices), best


@torch.no_grad()
def search(
    decoder: Decoder, prompts: Sequence[Sequence[int]], settings: GenerateConfig, tree: AnswerTree | None = None
) -> list[list[ScoredAnswer]]:
    """The best answers to each prompt, best first, at most G: token ids without the start token and without the end
    token.

    Args:
        decoder: fresh, with `settings.num_beams` beams.
        tree: the answers that there are, none longer than `settings.max_new_tokens`; no penalty applies then. None:
            any.
    Memory: three tensors of B G x V fp32, and 2G x max_new_tokens token ids a prompt.
    """
    shape = decoder.shape
    answers = [list[ScoredAnswer]() for _ in prompts]
    if not prompts:
        return answers
    decoder.join(prompts, settings.max_new_tokens)
    rows = list(range(len(prompts)))
    state = _Search(settings, len(prompts), shape.start_token_id, decoder.device, tree is not None)
    while rows:
        if tree is not None:
            nodes = state.nodes.cpu().numpy()
            width = int((nodes != DEAD).sum(1).max())  # The beams that go on are the first ones of their prompt.
            choices = tree.choices(nodes[:, :width].flatten(), shape.vocab_size)
            log_probs = decoder.log_probs(state.written[:, :width, -1].flatten(), choices)
            candidates = state.listed_candidates(log_probs, choices, tree, width)
        else:
            history = state.written.flatten(0, 1)
            log_probs = penalise(decoder.log_probs(history[:, -1]), history, settings, shape.eos_token_id)
            candidates = state.candidates(log_probs, shape.eos_token_id)
        decoder.follow(state.advance(candidates))
        done = [row for row, is_done in enumerate(state.done()) if is_done]
        for row in done:
            answers[rows[row]] = state.best_answers(row, shape.eos_token_id, tree)
        if done:
            order = decoder.drop(done)
            rows = [rows[row] for row in order]
            state.select(order)
    return answers
