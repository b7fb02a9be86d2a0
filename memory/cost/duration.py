"""How long will the rest of a run take? Its steps with the real lengths of their rows, its evaluations, its saves.

The formulas are in `memory.cost.speed`. What is told is a range, narrower with measured speeds than with the nominal ones of a
class; after the first steps it is told again, from what they took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from config import PREFERENCES, Config
from limits import SAMPLE_TOKENS
from memory.cost.generation import MOST_ROWS
from memory.cost.precision import dtype_bytes
from memory.cost.speed import Pace, evaluation_seconds, pace_of, typical_seconds, writing_seconds
from memory.cost.work import Choice, Machine, Work, state_bytes
from settings.fields import AUTO

RENEWED_STEPS = 20  # after so many steps the time is told again
WITHOUT_REFERENCE = "orpo"  # the preference loss that compares with no other model
UNTIMED_STEPS = 3  # the first of them warm caches up
RENEWED_SPREAD = 0.1  # at least: what steps scatter may be more


@dataclass(frozen=True)
class Schedule:
    """What is left of a run.

    Args:
        steps: to go. evaluations, saves: how many. evaluation_rows: of one evaluation, on this process.
        reference_steps: whose rows a reference model sees, too, before the run or in its steps.
        sample_tokens: of the longest answer at the end. scored_batches: of answers, in each evaluation; scored_tokens: of the
            longest of them.
    """

    steps: int
    evaluations: int
    saves: int
    evaluation_rows: int
    sample_tokens: int = 0
    scored_batches: int = 0
    scored_tokens: int = 0
    reference_steps: int = 0


@dataclass(frozen=True)
class Duration:
    """Seconds of what is left, and between which they lie."""

    seconds: float
    low: float
    high: float

    @classmethod
    def within(cls, seconds: float, spread: float) -> Duration:
        """The range that a spread makes: as many times longer as shorter."""
        return cls(seconds, seconds / (1 + spread), seconds * (1 + spread))


@dataclass(frozen=True)
class Times:
    """Predicted seconds of the parts of a run.

    Args:
        step: of the mean step. around: evaluations, saves, start and end together.
    """

    step: float
    around: float
    schedule: Schedule
    spread: float

    def total(self) -> Duration:
        """Of the whole."""
        return Duration.within(self.schedule.steps * self.step + self.around, self.spread)


def schedule_of(config: Config, first_step: int, held_out: int, answer_tokens: int, num_processes: int = 1) -> Schedule:
    """Count what is left behind `first_step` steps.

    An evaluation comes before the first step of a run, at its turns and at the end, where one of the mean of the last
    checkpoints may follow; each that is the best is saved, and while a model learns most are.

    Args:
        config: its steps resolved. held_out: rows of the validation data. answer_tokens: of the longest answer.
    """
    train, asked = config.train, config.metrics.eval_generate_rows
    last = int(train.max_steps)

    def turns(every: int) -> set[int]:
        return {*range(first_step + every - first_step % every, last + 1, every), last}

    rows = -(-min(train.eval_rows, held_out) // num_processes)
    scored = 0 if asked == AUTO else -(-min(int(asked), held_out) // num_processes)
    written = SAMPLE_TOKENS if train.sample_rows else 0
    if first_step >= last:
        return Schedule(0, 0, 0, rows, written)
    evaluations = turns(int(train.eval_steps)) if rows else set()
    saves = evaluations | turns(int(train.save_steps))
    others = int(first_step == 0 and rows > 0) + int(train.average_checkpoints > 1 and rows > 0)
    refers = config.data.objective == PREFERENCES and config.preference.preference_loss != WITHOUT_REFERENCE
    steps, batches = last - first_step, -(-scored // MOST_ROWS)
    compared = steps if refers else 0
    return Schedule(steps, len(evaluations) + others, len(saves), rows, written, batches, answer_tokens, compared)


def predict_times(work: Work, choice: Choice, machine: Machine, schedule: Schedule, pace: Pace | None = None) -> Times:
    """Predict the parts of a run, with measured speeds where there are any.

    Args:
        pace: constants of the class, as a calibration tries them; None: those of the machine's.
    """
    pace, spread_by_class = pace or pace_of(machine.speed_class), not machine.measured
    machine = machine.as_measured()
    step = typical_seconds(work, choice, machine, pace)
    answers = writing_seconds(work, choice, machine, 1, pace)
    evaluation = evaluation_seconds(work, choice, machine, schedule.evaluation_rows, pace)
    evaluation += schedule.scored_batches * schedule.scored_tokens * answers
    adapters = work.trained.adapters if work.trained else 0  # saved alone, in fp32
    weights = 4 * adapters or work.counts["total"] * dtype_bytes(choice.storage)
    saved = weights + state_bytes(work, choice.storage)
    referred = replace(work, evaluation=work.step_shapes)
    around = (
        schedule.evaluations * evaluation
        + schedule.saves * saved / pace.save_rate
        + work.counts["total"] / pace.build_rate
        + schedule.sample_tokens * answers
        + schedule.reference_steps * evaluation_seconds(referred, choice, machine, work.rows, pace)
    )
    return Times(step, around, schedule, pace.nominal_spread if spread_by_class else pace.spread)


class Renewal:
    """Tells the time that is left anew, once, from what the first steps took.

    Args:
        step_seconds, total_seconds: as they were predicted, of a step and of all that was left; None: nothing was.
        steps: that were left.
    """

    def __init__(self, step_seconds: float, total_seconds: float | None, steps: int) -> None:
        self._predicted, self._steps, self._taken = step_seconds, steps, list[float]()
        self._around = max(0.0, (total_seconds or 0.0) - steps * step_seconds)

    def after_step(self, seconds: float) -> Duration | None:
        """What is left after a step that took so long; None at all steps but the one that renews."""
        if len(self._taken) >= RENEWED_STEPS or self._steps <= RENEWED_STEPS:
            return None
        self._taken.append(seconds)
        if len(self._taken) < RENEWED_STEPS:
            return None
        timed = self._taken[UNTIMED_STEPS:]
        mean = sum(timed) / len(timed)
        scatter = math.sqrt(sum((one - mean) ** 2 for one in timed)) / len(timed) / mean if mean else 0.0
        share = 1 - RENEWED_STEPS / self._steps  # of what lies around the steps, spread over them
        slower = mean / self._predicted if self._predicted else 1.0
        left = (self._steps - RENEWED_STEPS) * mean + share * slower * self._around
        return Duration.within(left, max(RENEWED_SPREAD, 2 * scatter))
