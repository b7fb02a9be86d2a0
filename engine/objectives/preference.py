"""Direct preference optimization (DPO), in the memory of finetuning.

Every preference loss is a function of a few numbers: the log-probability of each answer. So after the decoder a first
pass over the head, in chunks and without gradients, gives them; the loss of a pair and its derivative by each
log-probability are scalar arithmetic in float64; and the ordinary chunked loss, each token weighted by its answer's
derivative, forms the gradients. A step is a finetuning step with weighted rows; no logits are held.

- sigmoid: DPO, Rafailov et al. 2023 (arXiv 2305.18290), equation 7.
- ipo: Azar et al. 2023 (arXiv 2310.12036), equation 17, over the mean log-probability of a token, as trl has it.
- orpo: Hong et al. 2024 (arXiv 2403.07691), equations 3 to 7: the chosen answer's mean cross-entropy and a ratio of
  odds; no reference model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.blockwise import Objective, TokenLosses
from model.loss import LossSettings, loss_and_gradients, token_losses
from model.micro_batch import MicroBatch
from settings.tasks import PREFERENCE_LOSSES

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
# Two rewards are equal whose difference is within this share of the log-probabilities: they are sums in fp32, and the
# reference's are stored in it, so that a model that is its own reference differs from itself by some of the last bits.
ROUNDING = 2.0**-20


def sigmoid_loss(compared: Tensor, beta: float) -> Tensor:
    """DPO: how surely the chosen answer gains more over the reference than the rejected one."""
    return -F.logsigmoid(beta * (compared[0] - compared[1]))


def ipo_loss(compared: Tensor, beta: float) -> Tensor:
    """IPO: the squared distance of the gain from its target."""
    return (compared[0] - compared[1] - 1 / (2 * beta)).square()


def orpo_loss(compared: Tensor, beta: float) -> Tensor:
    """ORPO: the cross-entropy of the chosen answer, and the ratio of the odds of both."""
    odds = log_odds(compared)
    return -compared[0] - beta * F.logsigmoid(odds[0] - odds[1])


# By the names of `settings.tasks.PREFERENCE_LOSSES`; each is a function of what is compared, (2, P), and beta.
FORMULAS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": sigmoid_loss,
    "ipo": ipo_loss,
    "orpo": orpo_loss,
}


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss over pairs of answers; P pairs, first row chosen, second rejected.

    Args:
        kind: a key of `FORMULAS`.
        beta: how closely the model stays to the reference, above 0; of orpo the weight of the ratio of odds.
    """

    kind: str = "sigmoid"
    beta: float = 0.1

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under a reference model enter."""
        return PREFERENCE_LOSSES[self.kind].has_reference

    def scores(self, policy: Tensor, lengths: Tensor) -> Tensor:
        """What the loss takes of an answer: its log-probability, or the mean over its tokens."""
        return policy / lengths if PREFERENCE_LOSSES[self.kind].takes_means else policy

    def __call__(self, policy: Tensor, reference: Tensor | None, lengths: Tensor) -> Tensor:
        """The loss of each pair.

        Args:
            policy, reference: (2, P) float64, summed log-probabilities of the answers. lengths: (2, P) their tokens.
        Returns:
            (P,), differentiable by `policy`.
        """
        return FORMULAS[self.kind](self._compared(policy, reference, lengths), self.beta)

    def rewards(self, policy: Tensor, reference: Tensor | None, lengths: Tensor) -> Tensor:
        """The implicit reward of each answer, (2, P): what the loss compares."""
        return self.beta * self._compared(policy, reference, lengths)

    def _compared(self, policy: Tensor, reference: Tensor | None, lengths: Tensor) -> Tensor:
        """The scores of both answers, (2, P): their gain over the reference where there is one."""
        if not self.needs_reference:
            return self.scores(policy, lengths)
        assert reference is not None
        return self.scores(policy - reference, lengths)

    def wins(self, policy: Tensor, reference: Tensor | None, lengths: Tensor) -> Tensor:
        """Whether the chosen answer of each pair (P,) has the larger reward: 1, else 0; equal but for rounding: 1/2."""
        rewards = self.rewards(policy, reference, lengths)
        margins = rewards[0] - rewards[1]
        size = self.rewards(policy, None if reference is None else torch.zeros_like(reference), lengths).abs().sum(0)
        return torch.where(margins.abs() <= ROUNDING * size, 0.5, (margins > 0).double())


def log_odds(log_probability: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p; p is kept below 1 by 1e-9."""
    below_one = log_probability.clamp(max=-1e-9)
    # Each form serves where it loses no digits.
    small = torch.log1p(-below_one.clamp(max=-math.log(2)).exp())
    large = torch.log(-torch.expm1(below_one.clamp(min=-math.log(2))))
    return below_one - torch.where(below_one < -math.log(2), small, large)


def answer_log_probabilities(losses: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Sum the negative token losses (N',) of each answer: (2, P), float64 on the CPU, chosen first."""
    sums = [-answer.sum() for answer in micro_batch.label_rows.split(losses.detach().cpu().double())]
    return torch.stack(sums).view(2, -1)


class PreferenceObjective(Objective):
    """Learns from micro-batches whose rows have two answers.

    Args:
        pair_loss: what is minimised, averaged over pairs.
        as_reference: a context in which the model computes as the reference does (adapters off), for micro-batches that
            bring no reference log-probabilities; None: they all bring them, or none are needed.
    Memory: that of cross-entropy, and one number a token.
    """

    def __init__(
        self, pair_loss: PreferenceLoss, as_reference: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        self.pair_loss = pair_loss
        self.as_reference = as_reference
        self._sums = torch.zeros(len(METRICS), dtype=torch.float64)

    def complete(self, micro_batches: Sequence[MicroBatch], token_losses: TokenLosses) -> Sequence[MicroBatch]:
        """Run the reference where its log-probabilities are needed and not known."""
        if not self.pair_loss.needs_reference or all(mb.reference is not None for mb in micro_batches):
            return micro_batches
        assert self.as_reference is not None, "the micro-batches must bring reference log-probabilities"
        with self.as_reference():
            # All micro-batches pass together, so that offloaded weights are loaded once.
            losses = token_losses(micro_batches)
        return [
            replace(micro_batch, reference=answer_log_probabilities(each, micro_batch).reshape(-1))
            for each, micro_batch in zip(losses, micro_batches, strict=True)
        ]

    def loss_and_gradients(
        self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, scale: float, settings: LossSettings
    ) -> tuple[Tensor, Tensor]:
        """See `Objective`; smoothing and z-loss of `settings` are of cross-entropy alone."""
        plain = LossSettings(settings.chunk_bytes)
        policy = answer_log_probabilities(token_losses(hidden, head, micro_batch.labels, plain), micro_batch)
        total, slopes = self._judge(policy, micro_batch)
        # A filler belongs to no row and has no label, so that its weight is of no effect.
        per_token = -slopes.reshape(-1)[micro_batch.label_rows.row_of_token(slopes.device)]
        weights = per_token.float().to(hidden.device)
        _, grad = loss_and_gradients(hidden, head, micro_batch.labels, scale, plain, head.grad, weights)
        return total.float().to(hidden.device), grad

    def loss(self, losses: Tensor, micro_batch: MicroBatch) -> Tensor:
        """See `Objective`."""
        total, _ = self._judge(answer_log_probabilities(losses, micro_batch), micro_batch)
        return total.float().to(losses.device)

    def clear(self) -> None:
        """See `Objective`."""
        self._sums.zero_()

    @property
    def metrics(self) -> dict[str, float]:
        """Sums over pairs of what trl logs under the same names; but a tie is half a win, trl's is none."""
        return dict(zip(METRICS, self._sums.tolist(), strict=True))

    def _judge(self, policy: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The summed loss of the pairs, and its derivative by each answer's log-probability, (2, P)."""
        lengths = torch.tensor(micro_batch.target.lengths, dtype=torch.float64).view(2, -1)
        reference = None if micro_batch.reference is None else micro_batch.reference.cpu().double().view(2, -1)
        with torch.enable_grad():
            leaf = policy.clone().requires_grad_()
            total = self.pair_loss(leaf, reference, lengths).sum()
            (slopes,) = torch.autograd.grad(total, leaf)
        rewards = self.pair_loss.rewards(policy, reference, lengths)
        margins = rewards[0] - rewards[1]
        scores = self.pair_loss.scores(policy, lengths)
        wins = self.pair_loss.wins(policy, reference, lengths)
        self._sums += torch.stack([*rewards, margins, wins, *scores]).sum(1)
        return total.detach(), slopes
