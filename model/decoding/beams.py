"""How is the likeliest of all answers looked for? Beam search: the best few beginnings grow side by side.

At each step every beginning of a prompt meets every token; the best 2G of these are looked at, so that G remain even if
all others end. One that ends among the best G is an answer, and the best G answers are kept. An answer's score is the
sum of its log-probabilities over its length to the power of `length_penalty`. A prompt is done when its best beginning
cannot beat the worst of G answers, as far as `early_stopping` wants that proven. Answers are those of Hugging Face's
search, token by token; there a batch continues until its last prompt is done, here each prompt leaves when it is.

Shapes: B prompts, G beams, V vocabulary. Source: transformers 5.23, `_beam_search`; Wu et al. 2016 (arXiv 1609.08144).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.decoding.choosing import Penalties
from model.decoding.kv_cache import Decoding

OUT = -1.0e9  # the score of what is out of the race; finite, so that sums stay numbers


@dataclass(frozen=True)
class BeamSettings:
    """How far the search goes.

    Args:
        num_beams: G, at least 2.
        limit: most tokens of an answer, at least 1.
        length_penalty: exponent of the length; above 0 favours long answers.
        early_stopping: "true": done when there are G answers; "false": when the best beginning, at its present length,
            scores no better than the worst answer; "never": when it cannot at any length.
    """

    num_beams: int
    limit: int
    length_penalty: float = 1.0
    early_stopping: str = "false"


class _Search:
    """The state of a search: beginnings that grow, and answers."""

    def __init__(self, settings: BeamSettings, rows: int, start: int, device: torch.device) -> None:
        self.settings = settings
        beams = settings.num_beams
        self.written = torch.full((rows, beams, 1), start, device=device)  # with the start token
        self.scores = torch.full((rows, beams), OUT, device=device)
        self.scores[:, 0] = 0.0  # all beginnings are alike yet: one is enough
        self.answers = self.written.clone()
        self.answer_scores = torch.full((rows, beams), OUT, device=device)
        self.is_answer = torch.zeros((rows, beams), dtype=torch.bool, device=device)
        self.is_open = torch.ones((rows, 1), dtype=torch.bool, device=device)  # whether better answers may come

    def advance(self, log_probs: Tensor, eos: int) -> Tensor:
        """Grow by one token: log_probs (B G, V) -> parents (B, G) of the new beginnings."""
        beams, count = self.settings.num_beams, self.written.shape[2]  # tokens of an answer that ends now
        totals = log_probs.view(-1, beams, log_probs.shape[1]).add_(self.scores.unsqueeze(2))
        parents, tokens, best = _best(totals, 2 * beams)
        grown = torch.cat([_take(self.written, parents), tokens.unsqueeze(2)], 2)  # (B, 2G, count + 1)
        ends = tokens == eos if count < self.settings.limit else torch.ones_like(tokens, dtype=torch.bool)
        going = best + ends.float() * OUT
        chosen = going.topk(beams)[1]
        self._gather_answers(grown, best, ends, count)
        self.written, self.scores = _take(grown, chosen), going.gather(1, chosen)
        self._close(count)
        return parents.gather(1, chosen)

    def _gather_answers(self, grown: Tensor, best: Tensor, ends: Tensor, count: int) -> None:
        """Keep the best G of the answers so far and of those that end now."""
        beams = self.settings.num_beams
        counts = ends.clone()
        counts[:, beams:] = False
        is_full = self.is_answer.all(1, keepdim=True) & (self.settings.early_stopping == "true")
        scores = best / count**self.settings.length_penalty
        scores = scores + is_full.float() * OUT + (~self.is_open).float() * OUT + (~counts).float() * OUT
        merged = torch.cat([self.answer_scores, scores], 1)
        kept = merged.topk(beams)[1]
        self.answers = torch.cat([self.answers, self.answers.new_zeros(*self.answers.shape[:2], 1)], 2)
        self.answers = _take(torch.cat([self.answers, grown], 1), kept)
        self.answer_scores = merged.gather(1, kept)
        self.is_answer = torch.cat([self.is_answer, counts], 1).gather(1, kept)

    def _close(self, count: int) -> None:
        settings = self.settings
        far = settings.early_stopping == "never" and settings.length_penalty > 0.0
        reachable = self.scores[:, :1] / (settings.limit if far else count) ** settings.length_penalty
        worst = torch.where(self.is_answer, self.answer_scores.amin(1, keepdim=True), OUT)
        self.is_open = self.is_open & (reachable > worst).any(1, keepdim=True)

    def done(self) -> Tensor:
        """(B,) bool: the prompts that need no further step."""
        if self.written.shape[2] > self.settings.limit:
            return torch.ones(len(self.written), dtype=torch.bool)
        full = self.is_answer.all(1) & (self.settings.early_stopping == "true")
        return full | ~self.is_open.squeeze(1)

    def select(self, rows: Tensor) -> None:
        """Continue with these prompts."""
        for name in ("written", "scores", "answers", "answer_scores", "is_answer", "is_open"):
            setattr(self, name, getattr(self, name)[rows])


def _best(totals: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best of all scores of a prompt: (B, G, V) -> beams, tokens and scores, each (B, count), best first.

    First those of each beam: the sort of a CPU pairs every score that it looks at with its place, four times as large.
    """
    scores, tokens = totals.topk(min(count, totals.shape[2]), 2)
    best, places = scores.flatten(1).topk(count)
    return places // scores.shape[2], tokens.flatten(1).gather(1, places), best


def _take(sequences: Tensor, places: Tensor) -> Tensor:
    """Sequences (B, X, L) at places (B, Y) -> (B, Y, L)."""
    return sequences.gather(1, places.unsqueeze(2).expand(-1, -1, sequences.shape[2]))


@torch.no_grad()
def search(decoding: Decoding, settings: BeamSettings, penalties: Penalties) -> list[list[int]]:
    """Find the best answer to each prompt.

    Args:
        decoding: fresh, with `settings.num_beams` beams.
    Returns:
        token ids of each answer, without the start token and without the end token.
    Memory: three tensors of B G x V fp32, and 2G x limit token ids a prompt.
    """
    config = decoding.model.config
    rows, eos = list(range(len(decoding.caches[0].cross_k))), config.eos_token_id
    answers: list[list[int]] = [[] for _ in rows]
    state = _Search(settings, len(rows), config.start_token_id, decoding.device)
    while rows:
        history = state.written.flatten(0, 1)
        log_probs = torch.log_softmax(decoding.step(history[:, -1]), 1)
        parents = state.advance(penalties(log_probs, history, history.shape[1] - 1), eos)
        decoding.follow(parents)
        done = state.done().tolist()
        if any(done):
            for place in (place for place, is_done in enumerate(done) if is_done):
                tokens = state.answers[place, 0, 1:].tolist()
                answers[rows[place]] = tokens[: tokens.index(eos)] if eos in tokens else tokens[: settings.limit]
            going = [place for place, is_done in enumerate(done) if not is_done]
            rows, kept = [rows[place] for place in going], torch.tensor(going, dtype=torch.long, device=decoding.device)
            if rows:
                state.select(kept)
                decoding.select(kept)
    return answers
