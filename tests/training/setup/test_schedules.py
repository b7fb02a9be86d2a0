"""Learning rates against the formulas and against torch's OneCycleLR."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from settings.loading import load
from training.setup.schedules import Steps, learning_rate


def test_cosine_is_half_way_down_in_the_middle_and_ends_just_above_zero() -> None:
    rates = [learning_rate(s, schedule="cosine", peak=1.0, warmup_steps=9, max_steps=108) for s in range(9, 110)]
    assert rates[0] == 1.0 and rates[50] == pytest.approx(0.5)
    assert rates[99] == pytest.approx((1 - math.cos(math.pi / 100)) / 2)
    assert rates[:100] == sorted(rates[:100], reverse=True)
    assert rates[100] == rates[99], "after the last step the rate stays"


def test_wsd_stays_up_for_two_thirds_and_falls_on_a_line_that_ends_just_behind_the_last_step() -> None:
    rates = [learning_rate(s, schedule="wsd", peak=1.0, warmup_steps=10, max_steps=300) for s in range(10, 302)]
    assert rates[:192] == [1.0] * 192, "up to step 201, from which it falls"
    assert rates[192:291] == pytest.approx([(100 - s) / 100 for s in range(1, 100)])
    assert rates[291] == rates[290] == pytest.approx(0.01)


def test_inverse_square_root_is_t5s() -> None:
    """Raffel et al.: 1 / sqrt(max(n, k)) with k = 10^4, that is a peak of 0.01 there."""
    for step in (10_000, 40_000, 1_000_000):
        rate = learning_rate(step, schedule="inverse_sqrt", peak=0.01, warmup_steps=10_000, max_steps=2**20)
        assert rate == pytest.approx(1 / math.sqrt(step))


def test_one_cycle_is_torchs() -> None:
    steps = 40
    warmup = 10
    peak = 3e-3
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps, pct_start=warmup / steps)
    for step in range(1, steps + 1):
        ours = learning_rate(step, schedule="one_cycle", peak=peak, warmup_steps=warmup, max_steps=steps)
        assert ours == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        if step < steps:
            scheduler.step()


@pytest.mark.parametrize(
    "flags,rate",
    [
        ({}, 2e-2),
        ({"optimizer": "muon"}, 5e-2),
        ({"model_preset": "t5-3b"}, 2.5e-3),  # steps add up over 48 blocks
        ({"optimizer": "adamw"}, 3e-4),  # takes steps of one size, whatever the weight's
        ({"learning_rate": 0.5}, 0.5),
        ({"max_steps": 1_000_000}, 3.8e-3),
        ({"is_finetune": True, "finetune_from": "folder", "model_preset": "t5-small"}, 1.75e-3),
        ({"is_finetune": True, "finetune_from": "folder"}, 1.3e-2),  # small ones have to move further
        ({"finetune_from": "folder", "lora_rank": 8}, 1e-2),
    ],
)
def test_the_rate_that_nobody_named(flags: dict[str, Any], rate: float) -> None:
    preset = {"model_preset": flags.pop("model_preset", "tiny")}
    config = load("train", {"train_file": "x", **preset}).with_changes(**flags)
    steps = Steps.of(config.train, config.model, config.lora, config.task, 8, 100)
    assert steps.learning_rate == pytest.approx(rate, rel=0.01)
