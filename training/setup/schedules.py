"""Steps of a run and the learning rate of each, a pure function of its number: resuming needs no state.

Steps count from 1. Every schedule but one_cycle begins with a linear warm-up that reaches the peak at `warmup_steps`.
Sources: inverse square root, Raffel et al. 2020, section 3.1.2; cosine, Loshchilov & Hutter 2017, here down to zero
just after the last step, which for a run of fixed length beats stopping at a tenth (Bergsma et al. 2025), as does the
line that ends "wsd" (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395; how long it falls: Hägele et al. 2024,
arXiv 2405.18392); one cycle, Smith & Topin 2018, with the shape and the constants of torch's OneCycleLR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from model.shapes import weight_counts
from settings.declared import LoraConfig, T5ModelConfig, TrainConfig
from settings.fields import AUTO
from settings.optimizers import OPTIMIZERS
from tasks.base import BaseTask

ADAPTER_RATE = 1e-3  # The rate of adamw on adapters, which begin at zero and are few.
DECAY_SHARE = 1 / 3  # "wsd" falls in this part of a run's steps.
ONE_CYCLE_START_DIVISOR = 25.0
ONE_CYCLE_END_DIVISOR = 1e4

# A model that has learnt before moves, where steps are scaled by each weight's size, a tenth of what a random one of
# its size learns at: 1e-3 for adafactor above 390M weights, as in the T5 paper (Raffel et al. 2020, section 3.1.3,
# constant at 0.001), and 1.75e-3 for t5-small's 60M. Smaller ones have to move further: with 3.2M and 0.5M weights a
# tenth left most of two tasks unlearnt that 1e-2 and 3e-2 learnt, and 20M learn summaries the better the more
# (docs/benchmarks.md, rates). So the part rises with the 0.8th power, to the whole rate at 3.4M.
FINETUNE_RATE = 0.1
FINETUNE_WEIGHTS = 60e6
FINETUNE_EXPONENT = 0.8
# Small models that start from random weights learn faster above T5's own 1e-2. Sweeps of 1.4M and 6M weights found 3e-2
# and more (docs/benchmarks.md, quality), words to phones with 3.2M weights too (docs/recipes.md), where 6e-2 diverged;
# so twice T5's rate keeps a distance. Muon, whose matrices do not grow by what they have become, learns best at 5e-2
# and 6e-2 (prose with 1.4M weights, dates, summaries). It falls with the 0.3rd power of the weights, to T5's own at
# 390M.
LARGE_WEIGHTS = 390e6
RATE_EXPONENT = 0.3
# The changes of one step add up over the blocks of a model: with 32 blocks and random weights the loss jumped from 6.4
# to 10.9 in the third step at the rate of its size, from 6.5 to 7.8 at half of it and from 6.2 to 7.1 at a quarter,
# which also ended lowest; 5 or 10 steps of warm-up only moved the jump (10 steps in all). So a model of more blocks
# than t5-small's learns slower by as much, unless its warm-up is long: T5's own of 10,000 steps took 1e-2 with 48
# blocks.
SHALLOW_BLOCKS = 12
SHORT_WARMUP = 25
# A step that goes with a weight's size, in a direction of its own, makes the weight larger by rate^2 / 2: over a long
# run it grows by e to the sum of that, and with it all later steps. 16,000 steps at 3e-2 came to 2.7 and learnt to
# their end (docs/recipes.md), T5's million of steps to 2.8.
MOST_GROWTH = 2.7
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Steps:
    """The steps of a run.

    Args:
        effective_batch_size: rows of each. max_steps: how many there are. warmup_steps: of them, until the highest
            learning rate. eval_steps, save_steps: from one evaluation, or checkpoint, to the next.
        learning_rate: the highest. lr_schedule: its course.
    """

    effective_batch_size: int
    max_steps: int
    warmup_steps: int
    eval_steps: int
    save_steps: int
    learning_rate: float
    lr_schedule: str

    @classmethod
    def of(
        cls,
        train: TrainConfig,
        model: T5ModelConfig,
        lora: LoraConfig,
        task: BaseTask,
        effective_batch_size: int,
        rows: int,
    ) -> Steps:
        """What the settings name; what is auto follows from the rows of the training data."""
        steps = train.max_steps
        if steps == AUTO:
            epochs = or_else(train.epochs, 3.0 if train.is_finetune else 1.0)
            steps = max(1, math.ceil(rows * epochs / effective_batch_size))
        steps = int(steps)
        warmup = or_else(train.warmup_steps, min(10_000, steps // 10))
        rate = train.learning_rate
        if rate == AUTO:
            rate = _highest_rate(train, model, lora.lora_rank > 0, task, warmup, steps)
        return cls(
            effective_batch_size,
            steps,
            warmup,
            or_else(train.eval_steps, max(1, min(1000, steps // 5))),
            or_else(train.save_steps, max(1, min(1000, steps // 10))),
            float(rate),
            train.lr_schedule,
        )

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        return learning_rate(
            step,
            schedule=self.lr_schedule,
            peak=self.learning_rate,
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
        )


def or_else(requested: float | str, otherwise: Number) -> Number:
    """A number that was asked for, or where it is auto another, which is of the same type."""
    return otherwise if requested == AUTO else type(otherwise)(requested)


def _highest_rate(
    train: TrainConfig, model: T5ModelConfig, has_adapters: bool, task: BaseTask, warmup: int, steps: int
) -> float:
    is_relative = train.optimizer != "adamw"
    facts = OPTIMIZERS[train.optimizer]
    rate = ADAPTER_RATE if has_adapters and not is_relative else facts.learning_rate
    share = task.rate_share(has_adapters)
    if share is not None:
        rate *= share
    elif is_relative and not (has_adapters and _is_trained(train)):
        weights = weight_counts(model)["total"]
        rate = max(rate, min(facts.small_rate, rate * (LARGE_WEIGHTS / weights) ** RATE_EXPONENT))
        if _is_trained(train):
            rate *= min(1.0, FINETUNE_RATE * max(1.0, (FINETUNE_WEIGHTS / weights) ** FINETUNE_EXPONENT))
        else:
            rate *= depth_share(model, warmup)
    return min(rate, long_run_rate(train.lr_schedule, warmup, steps)) if is_relative else rate


def depth_share(model: T5ModelConfig, warmup: int) -> float:
    """The part of its rate that a model with random weights bears for its number of blocks and steps of warm-up."""
    blocks = model.num_layers + model.num_decoder_layers
    return min(1.0, SHALLOW_BLOCKS / blocks * max(1.0, warmup / SHORT_WARMUP))


def _is_trained(train: TrainConfig) -> bool:
    """Whether weights have learnt before: those of a model that is named, or, finetuning, of the newest run."""
    return train.finetune_from is not None and (train.finetune_from != AUTO or train.is_finetune)


def long_run_rate(schedule: str, warmup: int, steps: int) -> float:
    """The highest rate at which weights whose steps go with their size do not grow out of bounds in so many steps."""
    looked_at = range(1, steps + 1, max(1, steps // 1000))
    squares = [
        learning_rate(at, schedule=schedule, peak=1.0, warmup_steps=warmup, max_steps=steps) ** 2 for at in looked_at
    ]
    return math.sqrt(2 * MOST_GROWTH / (sum(squares) / len(squares) * steps))


def learning_rate(step: int, *, schedule: str, peak: float, warmup_steps: int, max_steps: int) -> float:
    """Learning rate of one step.

    Args:
        step: number of the step, from 1; after `max_steps` the rate stays that of the last step.
        schedule: "cosine", "inverse_sqrt", "one_cycle", "constant" or "wsd".
        peak: highest learning rate, more than 0.
        warmup_steps: steps until the peak, 0 or more; at most `max_steps` take place.
        max_steps: steps of the whole run, 1 or more.
    """
    step = min(max(step, 1), max_steps)
    warmup = min(warmup_steps, max_steps)
    if schedule == "one_cycle":
        first = peak / ONE_CYCLE_START_DIVISOR
        top = max(warmup, 1)
        if step < warmup:
            return _half_cosine(first, peak, (step - 1) / (warmup - 1))
        return _half_cosine(peak, first / ONE_CYCLE_END_DIVISOR, (step - top) / max(max_steps - top, 1))
    if step < warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    if schedule == "wsd":
        after_warmup = max_steps + 1 - warmup  # After a long warm-up there is less than a third to fall over.
        return peak * min(1.0, (max_steps + 1 - step) / max(1.0, min(DECAY_SHARE * max_steps, after_warmup)))
    if schedule == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / max(step, 1))
    assert schedule == "cosine", schedule
    return _half_cosine(peak, 0.0, (step - warmup) / (max_steps + 1 - warmup))


def _half_cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1.0 + math.cos(math.pi * share)) / 2.0
