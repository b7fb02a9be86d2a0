"""`resolve(config, machine, rows)` decides all settings that were left `auto`; torch is not imported.

Three things meet here: what was asked for (`Config`), what there is (`Machine`), and the rows that will be read
(`RunRows`). A run that starts, one that goes on and the command `plan` all come through `resolve`, so that what is
planned is what is done.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from common.storage import NotMade
from data.batches.loader import StepLoader
from data.batches.rows import lengths_of
from data.batches.step_lengths import StepLengths, drawn_lengths, evaluation_lengths, step_lengths
from data.prepare.estimate import LengthEstimate, estimate_lengths
from data.prepare.looking import look
from data.prepare.preparing import Prepared, find_prepared
from data.prepare.training_data import file_problems, find_training_data, held_out_sources
from data.prepare.writing import HELD_OUT_ONE_IN
from memory.estimate.precision import BFLOAT16, FLOAT32
from memory.estimate.shapes import Shapes
from memory.estimate.time import predict_times, remaining_work
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.plan import Plan, plan
from memory.step_settings import StepSettings
from memory.step_work import effective_batch, make_work
from model.formats.headers import TensorHeaders
from model.shapes import weight_counts
from settings.declared import Config, DataConfig, LoraConfig, T5ModelConfig, TrainConfig
from settings.errors import UserError
from settings.fields import AUTO
from settings.tasks import default_objective, task_named
from training.saved_model import SavedModel
from training.setup.schedules import Steps


@dataclass(frozen=True)
class RunRows:
    """The rows that a run reads, as far as they are known.

    Args:
        objective: what they teach. source_tokens, target_tokens: of the longest that can come, all answers of a row
            together.
        answer_tokens: of the longest that an evaluation may write.
        count: of the training data; None: that is not known. held_out: of the validation data.
        lengths, evaluation: tokens of the rows of all steps to come, and of an evaluation; None: all are the longest.
        sample: of which all of this is estimated; None: it is known, or as the settings allow.
    """

    objective: str
    source_tokens: int
    target_tokens: int
    answer_tokens: int
    count: int | None
    held_out: int
    lengths: Shapes | None = None
    evaluation: Shapes | None = None
    sample: LengthEstimate | None = None

    @classmethod
    def as_set(cls, data: DataConfig, objective: str, eval_rows: int) -> RunRows:
        """Of data that is not prepared: as long as the settings allow."""
        lengths = lengths_of(data, objective)
        answers = lengths.target_tokens * task_named(objective).answers_per_row
        return cls(objective, lengths.input_tokens, answers, answers, None, eval_rows)

    @classmethod
    def ahead(
        cls,
        data: Prepared,
        train: StepLoader,
        validation: StepLoader,
        steps: range,
        *,
        effective_batch_size: int,
        eval_rows: int,
        num_processes: int = 1,
    ) -> RunRows:
        """Of prepared data, as they come in these steps."""
        lengths = step_lengths(train, data.train_dir, steps, effective_batch_size, num_processes)
        evaluation = evaluation_lengths(validation, eval_rows, num_processes)
        source, target = map(max, train.longest, validation.longest)
        return cls(
            data.objective,
            source,
            target,
            train.longest_answer,
            train.num_rows,
            validation.num_rows,
            _shapes(lengths, None if train.max_tokens == math.inf else int(train.max_tokens)),
            _shapes(evaluation, None),
        )

    @classmethod
    def of_sample(cls, config: Config, machine: Machine, sample: LengthEstimate) -> RunRows:
        """Of data that is not prepared: like some of its rows, and one that is longer."""
        data = config.data
        eval_rows = config.train.eval_rows
        lengths = sample.cut(data)
        longest = sample.longest(data)
        processes = machine.num_processes
        batch = effective_batch(config.train, machine)
        steps = drawn_lengths(lengths, longest, batch, processes, data.group_by_length)
        evaluation = drawn_lengths(lengths, longest, eval_rows, processes, most_steps=1)
        held_out = sample.held_out_rows
        if not held_out and data.validation_file is None and not held_out_sources(data):
            held_out = max(1, sample.about_rows // HELD_OUT_ONE_IN)
        return cls(
            sample.objective,
            *longest,
            longest[1],
            sample.about_rows,
            held_out or eval_rows,
            _shapes(steps, data.batch_tokens or None),
            _shapes(evaluation, None),
            sample,
        )

    @classmethod
    def known(cls, config: Config, machine: Machine) -> RunRows:
        """Of the data that the settings name, where it is prepared; else like a sample of it, or as long as they allow.

        Raises:
            UserError: the data are here and cannot be used, as a run would say.
        """
        objective = config.data.objective
        if objective == AUTO:
            objective = default_objective(config.train.is_finetune)
        is_known = config.data.train_file is not None and not file_problems(config.data)
        with suppress(NotMade):
            data = look(config, find_prepared, config) if is_known else None
            if data is not None:
                train, validation = (
                    StepLoader(split, data.objective, config.data, config.model, config.run.seed)
                    for split in (data.train_dir, data.validation_dir)
                )
                batch = effective_batch(config.train, machine)
                steps = Steps.of(config.train, config.model, config.lora, config.task, batch, train.num_rows)
                return cls.ahead(
                    data,
                    train,
                    validation,
                    range(steps.max_steps),
                    effective_batch_size=batch,
                    eval_rows=config.train.eval_rows,
                    num_processes=machine.num_processes,
                )
            groups = config.data, config.train.is_finetune, config.model, config.tokenizer, config.cleaning
            sample = look(config, estimate_lengths, *groups) if is_known else None
            if sample is not None:
                return cls.of_sample(config, machine, sample)
        if config.data.objective == AUTO and config.data.train_file is not None:
            # Nothing but the data says what they teach, so that they have to be here.
            objective = look(config, find_training_data, config.data, config.train.is_finetune).objective
        return cls.as_set(config.data, objective, config.train.eval_rows)


@dataclass(frozen=True)
class RunSpec:
    """A run in which nothing is left to decide: beside `config`, no value here is auto.

    Args:
        config: the settings, with the objective of the rows. machine, rows: what they were decided for.
        done: steps that were done before.
        plan: how its steps go, in how much memory. steps: how many there are, and their learning rates; None: that
            cannot be known, since the rows are not counted and no number of steps is named.
    """

    config: Config
    machine: Machine
    rows: RunRows
    plan: Plan
    steps: Steps | None
    done: int = 0

    @property
    def work(self) -> Workload:
        """What one of its steps has to do, on one process."""
        work = make_work(self.config, self.machine, self.rows.source_tokens, self.rows.target_tokens)
        mapped = mapped_base(self.config.train, self.config.lora, self.config.data, self.config.model)
        return replace(work, shapes=self.rows.lengths, evaluation=self.rows.evaluation, mapped=mapped)

    @property
    def settings(self) -> Config:
        """The settings with what was decided for the whole run in them. What the machine decides stays as it was asked
        for: where the run goes on, it may be another.
        """
        return self.config.with_changes(**asdict(self.counted))

    @property
    def counted(self) -> Steps:
        """The steps of a run whose rows are there."""
        assert self.steps is not None, "a run knows its rows"
        return self.steps


def resolve(
    config: Config,
    machine: Machine,
    rows: RunRows,
    *,
    done: int = 0,
    earlier: ExecutionPlan | None = None,
    changed: Collection[str] = (),
    running: ExecutionPlan | None = None,
    settings: StepSettings | None = None,
) -> RunSpec:
    """Decide all that a run needs.

    Args:
        config: its objective is that of the rows.
        rows: that it reads.
        done: steps so far. earlier: how they were done; kept where it still fits. changed: settings that ask for
            another way.
        running: how the steps of a run that is under way are done: its dtypes and offloaded weights stay.
        settings: that stand over what `config` fixes of a step; None: it alone counts.
    Raises:
        DoesNotFit: no way fits the machine's budget. UserError: settings that this machine cannot follow.
    """
    steps = None
    if rows.count is not None or config.train.max_steps != AUTO:
        batch = effective_batch(config.train, machine)
        steps = Steps.of(config.train, config.model, config.lora, config.task, batch, rows.count or 0)
    chosen = plan(
        config,
        machine,
        source_tokens=rows.source_tokens,
        target_tokens=rows.target_tokens,
        shapes=rows.lengths,
        evaluation=rows.evaluation,
        earlier=earlier,
        changed=changed,
        running=running,
        settings=settings,
        mapped=mapped_base(config.train, config.lora, config.data, config.model),
        steps=None if steps is None else steps.max_steps,
    )
    spec = RunSpec(config, machine, rows, chosen, steps, done)
    if steps is None:
        return spec
    work_left = remaining_work(spec.settings, done, rows.held_out, rows.answer_tokens, machine.num_processes)
    total = predict_times(spec.work, chosen.choice, machine, work_left)
    timed = replace(chosen, seconds_total=total.seconds, seconds_low=total.low, seconds_high=total.high)
    return replace(spec, plan=timed)


def mapped_base(train: TrainConfig, lora: LoraConfig, data: DataConfig, model: T5ModelConfig) -> tuple[str, int]:
    """The dtype of the base that adapters stand on, and how many of its weights may stay in its file."""
    start = train.finetune_from
    if not lora.lora_rank or start in (AUTO, None):
        return "", 0
    try:
        file_dtype = TensorHeaders(SavedModel.read(start).base).matrix_dtype()
    except UserError:  # The run refuses it.
        return "", 0
    counts = weight_counts(model)
    mapped = counts["total"]
    if data.extra_tokens is not None:  # Its tables get new rows, in memory.
        mapped -= counts["embedding"] + counts["head"]
    return {"F32": FLOAT32, "BF16": BFLOAT16}.get(file_dtype, ""), mapped


def _shapes(lengths: StepLengths, max_tokens: int | None) -> Shapes:
    return Shapes(lengths.sources, lengths.targets, lengths.is_complete, max_tokens)
