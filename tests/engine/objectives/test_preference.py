"""Preference losses and their gradients are those of the papers' formulas, whatever the micro-batches and the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batches.collate import PreferenceRow, collate_preferences
from engine.blockwise import Blockwise
from engine.objectives.preference import (
    PreferenceLoss,
    PreferenceObjective,
)
from engine.step import to_micro_batch
from model.micro_batch import MicroBatch
from model.t5 import T5
from settings.declared import T5ModelConfig
from tests.engine.small_models import (
    CUTS,
    Gradients,
    assert_near,
    blockwise_of,
    pass_gradients,
    small_model,
    taken_gradients,
)

LOSSES = {
    "sigmoid": PreferenceLoss("sigmoid", beta=0.3),
    "ipo": PreferenceLoss("ipo", beta=0.7),
    "orpo": PreferenceLoss("orpo", beta=0.6),
}
CPU = torch.device("cpu")


def draw_rows(count: int = 4, seed: int = 0, vocab: int = 61, longest: int = 9) -> list[PreferenceRow]:
    """Prompts with two answers, all of different length."""
    rng = np.random.default_rng(seed)

    def ids(most: int) -> np.ndarray:
        return rng.integers(2, vocab, rng.integers(1, most + 1))

    return [
        PreferenceRow(
            ids(17), ids(longest), ids(longest), int(rng.integers(1 << 62)), rng.normal(-20, 4, 2).astype("f4")
        )
        for _ in range(count)
    ]


def make_micro_batch(rows: list[PreferenceRow]) -> MicroBatch:
    return to_micro_batch(collate_preferences(rows, 0), T5ModelConfig(), CPU)


def preferring(model: T5, name: str, saved: int = 99) -> Blockwise:
    return blockwise_of(model, saved, objective=PreferenceObjective(LOSSES[name]))


def one_pass(blockwise: Blockwise, rows: list[PreferenceRow], cuts: list[list[int]]) -> Gradients:
    """Mean loss and gradients."""
    micro_batches = [make_micro_batch([rows[index] for index in cut]) for cut in cuts]
    return pass_gradients(blockwise, micro_batches, len(rows))


def log_probability(model: T5, prompt: np.ndarray, answer: np.ndarray) -> Tensor:
    """log p(answer | prompt) by plain autograd over the model, one row at a time, from the logits on in float64."""
    labels = torch.from_numpy(answer)[None]
    logits = model.logits(torch.from_numpy(prompt)[None], model.shift_right(labels))
    return logits.double().log_softmax(-1).gather(2, labels[..., None]).sum()


def paper_loss(name: str, chosen: Tensor, rejected: Tensor, row: PreferenceRow) -> Tensor:
    """The formulas as the papers print them, with plain exponentials."""
    pair_loss = LOSSES[name]
    c = len(row.chosen)
    r = len(row.rejected)
    assert row.reference is not None
    ref_chosen, ref_rejected = map(float, row.reference)
    if name == "orpo":
        p = (chosen / c).exp()
        q = (rejected / r).exp()
        ratio = (p / (1 - p)) / (q / (1 - q))
        return -p.log() - pair_loss.beta * (1 / (1 + 1 / ratio)).log()
    if name == "ipo":
        h = (chosen - ref_chosen) / c - (rejected - ref_rejected) / r
        return (h - 1 / (2 * pair_loss.beta)) ** 2
    h = pair_loss.beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    preferred = 1 / (1 + (-h).exp())
    return -preferred.log()


def formula_gradients(model: T5, rows: list[PreferenceRow], name: str) -> Gradients:
    losses = []
    for row in rows:
        chosen, rejected = (log_probability(model, row.input_ids, answer) for answer in (row.chosen, row.rejected))
        losses.append(paper_loss(name, chosen, rejected, row))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), taken_gradients(model)


@pytest.mark.parametrize(
    ("name", "cut", "saved"),
    [("sigmoid", "one", 99), ("ipo", "four", 99), ("orpo", "uneven", 0)],
)
def test_loss_and_gradients_are_those_of_the_formula(name: str, cut: str, saved: int) -> None:
    model = small_model(d_kv=16 if saved else 8)
    rows = draw_rows()
    ours = one_pass(preferring(model, name, saved), rows, CUTS[cut])
    assert_near(ours, formula_gradients(model, rows, name), 2e-5, loss_tolerance=2e-6)


# What trl's own functions give: DPOTrainer.dpo_loss (sigmoid, ipo) and ORPOTrainer.odds_ratio_loss with the mean
# negative log-probability of the chosen answer added, trl 0.17.0, in float64. Log-probabilities and tokens of four
# pairs:
POLICY = [[-12.5, -30.25, -7.0, -41.0], [-14.0, -22.75, -7.5, -80.5]]
REFERENCE = [[-13.0, -28.0, -9.5, -40.0], [-13.25, -25.5, -7.25, -60.0]]
TOKENS = [[5.0, 11.0, 3.0, 16.0], [6.0, 9.0, 3.0, 20.0]]
TRL = [
    (
        PreferenceLoss("sigmoid", 0.1),
        [0.6325990353, 0.9740769842, 0.5650706677, 0.1330210751],
        [[0.05, -0.225, 0.25, -0.1], [-0.075, 0.275, -0.025, -2.05]],
    ),
    (
        PreferenceLoss("ipo", 0.1),
        [22.800625, 30.3612131415, 16.6736111111, 16.30140625],
        [[0.01, -0.0204545455, 0.0833333333, -0.00625], [-0.0125, 0.0305555556, -0.0083333333, -0.1025]],
    ),
    (
        PreferenceLoss("orpo", beta=0.1),
        [2.5788837225, 2.831997354, 2.3939152693, 2.5821948659],
        [[-0.25, -0.275, -0.2333333333, -0.25625], [-0.2333333333, -0.2527777778, -0.25, -0.4025]],
    ),
]


@pytest.mark.parametrize(("pair_loss", "losses", "rewards"), TRL, ids=["sigmoid", "ipo", "orpo"])
def test_losses_and_rewards_are_those_of_trl(
    pair_loss: PreferenceLoss, losses: list[float], rewards: list[list[float]]
) -> None:
    policy, reference, tokens = (torch.tensor(part, dtype=torch.float64) for part in (POLICY, REFERENCE, TOKENS))
    assert pair_loss(policy, reference, tokens).tolist() == pytest.approx(losses, abs=1e-9)
    ours = pair_loss.rewards(policy, reference, tokens)
    assert ours.flatten().tolist() == pytest.approx([number for part in rewards for number in part], abs=1e-9)
