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

from data.batches.loader import StepLoader
from data.batches.rows import lengths_of
from data.batches.step_lengths import StepLengths, drawn_lengths, evaluation_lengths, step_lengths
from data.prepare.estimate import LengthEstimate, estimate_lengths
from data.prepare.looking import look
from data.prepare.preparing import Prepared, find_prepared
from data.prepare.training_data import file_problems, find_training_data, held_out_sources
from data.prepare.writing import HELD_OUT_ONE_IN
from data.sources.embedding_columns import USUAL_TEXTS
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
from support.storage import NotMade
from training.saved_model import SavedModel
from training.setup.schedules import Steps


@dataclass(frozen=True)
class RunRows:
    """How many rows a run reads and how long they are, as far as that is known.

    Args:
        objective: the objective that they are for, a key of `settings.tasks.TASKS`.
        source_tokens: encoder tokens of the longest row that may come.
        target_tokens: decoder tokens of the longest row that may come, all its answers together.
        answer_tokens: tokens of the longest answer that an evaluation may write.
        count: rows of the training data; None: not known.
        held_out: rows of the validation data.
        lengths: tokens of the rows of all steps to come; None: each row as long as the longest.
        evaluation: the same for the rows of one evaluation.
        sample: the first rows, which all of this was estimated from; None: it was not estimated.
        texts: of a row whose texts are compared with those of other rows, on average.
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
    texts: float = USUAL_TEXTS

    @classmethod
    def longest_allowed(cls, data: DataConfig, objective: str, eval_rows: int) -> RunRows:
        """The longest rows that the settings allow, for data that are not there or not readable yet."""
        lengths = lengths_of(data, objective)
        answers = lengths.target_tokens * task_named(objective).answers_per_row
        return cls(objective, lengths.input_tokens, answers, answers, None, eval_rows)

    @classmethod
    def of_prepared(
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
        """The rows of prepared data in the order in which these steps read them."""
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
            texts=data.counts["train_texts"] / max(1, data.counts["train_rows"]),
        )

    @classmethod
    def from_sample(cls, config: Config, machine: Machine, sample: LengthEstimate) -> RunRows:
        """An estimate for data that are not prepared: steps of rows drawn from the sample, and one very long row."""
        data = config.data
        eval_rows = config.train.eval_rows
        lengths = sample.cut(data)
        longest = sample.longest(data)
        processes = machine.num_processes
        batch = effective_batch(config.train, machine)
        steps = drawn_lengths(lengths, longest, batch, processes, data.group_by_length)
        evaluation = drawn_lengths(lengths, longest, eval_rows, processes, most_steps=1)
        held_out = sample.held_out_rows
        # Without validation data of its own, a run holds out one training row in so many.
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
            sample.texts,
        )

    @classmethod
    def find(cls, config: Config, machine: Machine) -> RunRows:
        """The best that can be said without preparing anything: of prepared data their rows, of others an estimate from
        the first rows, and of files that are not there the longest rows that the settings allow.

        Raises:
            UserError: the data are there, but a run could not use them.
        """
        objective = config.data.objective
        if objective == AUTO:
            objective = default_objective(config.train.is_finetune)
        has_files = config.data.train_file is not None and not file_problems(config.data)
        with suppress(NotMade):
            data = look(config, find_prepared, config) if has_files else None
            if data is not None:
                train, validation = (
                    StepLoader(split, data.objective, config.data, config.model, config.run.seed)
                    for split in (data.train_dir, data.validation_dir)
                )
                batch = effective_batch(config.train, machine)
                steps = Steps.of(config.train, config.model, config.lora, config.task, batch, train.num_rows)
                return cls.of_prepared(
                    data,
                    train,
                    validation,
                    range(steps.max_steps),
                    effective_batch_size=batch,
                    eval_rows=config.train.eval_rows,
                    num_processes=machine.num_processes,
                )
            arguments = config.data, config.train.is_finetune, config.model, config.tokenizer, config.cleaning
            sample = look(config, estimate_lengths, *arguments) if has_files else None
            if sample is not None:
                return cls.from_sample(config, machine, sample)
        if config.data.objective == AUTO and config.data.train_file is not None:
            # With --objective auto the data decide the objective, so here they must be readable.
            objective = look(config, find_training_data, config.data, config.train.is_finetune).objective
        return cls.longest_allowed(config.data, objective, config.train.eval_rows)


@dataclass(frozen=True)
class RunSpec:
    """All decisions for a run. Only `config` may still hold auto: it is as the user set it.

    Args:
        config: the settings, with the objective of the rows.
        machine: the machine that the plan is for.
        rows: the rows that the plan is for.
        plan: how the steps are done, and in how much memory.
        steps: number of steps, and their learning rates; None: neither are the rows counted nor is `max_steps` set.
        done: steps that were done before, of a resumed run.
    """

    config: Config
    machine: Machine
    rows: RunRows
    plan: Plan
    steps: Steps | None
    done: int = 0

    @property
    def work(self) -> Workload:
        """The work of one step on one process, as the estimates take it."""
        work = make_work(self.config, self.machine, self.rows.source_tokens, self.rows.target_tokens)
        mapped = mapped_base(self.config.train, self.config.lora, self.config.data, self.config.model)
        rows = self.rows
        return replace(work, shapes=rows.lengths, evaluation=rows.evaluation, texts=rows.texts, mapped=mapped)

    @property
    def config_with_steps(self) -> Config:
        """`config` with the values of `steps` in place of auto, since these hold for the whole run. What depends on the
        machine stays as the user set it: the run may be resumed on another.
        """
        return self.config.with_changes(**asdict(self.run_steps))

    @property
    def run_steps(self) -> Steps:
        """`steps` of a run that starts: its rows are counted."""
        assert self.steps is not None, "a run that starts has counted its rows"
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
    """Decide everything that the settings leave auto.

    Args:
        config: its objective must be that of the rows.
        rows: the rows that the run reads.
        done: steps done before.
        earlier: the plan of those steps; kept where it still fits.
        changed: settings changed since then that need another plan.
        running: the plan of a run under way, whose dtypes and offloaded weights must stay.
        settings: override what `config` fixes of a step; None: `config` alone counts.
    Raises:
        DoesNotFit: no plan fits the machine's budget.
        UserError: settings that this machine cannot follow.
    """
    steps = None
    if rows.count is not None or config.train.max_steps != AUTO:
        batch = effective_batch(config.train, machine)
        steps = Steps.of(config.train, config.model, config.lora, config.task, batch, rows.count or 0)
    chosen_plan = plan(
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
    spec = RunSpec(config, machine, rows, chosen_plan, steps, done)
    if steps is None:
        return spec
    work_left = remaining_work(spec.config_with_steps, done, rows.held_out, rows.answer_tokens, machine.num_processes)
    time_left = predict_times(spec.work, chosen_plan.choice, machine, work_left)
    timed_plan = replace(
        chosen_plan, seconds_total=time_left.seconds, seconds_low=time_left.low, seconds_high=time_left.high
    )
    return replace(spec, plan=timed_plan)


def mapped_base(train: TrainConfig, lora: LoraConfig, data: DataConfig, model: T5ModelConfig) -> tuple[str, int]:
    """Dtype of the frozen base of adapters, and how many of its weights may stay memory-mapped; ("", 0): none may."""
    start = train.finetune_from
    if not lora.lora_rank or start in (AUTO, None):
        return "", 0
    try:
        file_dtype = TensorHeaders(SavedModel.read(start).base).matrix_dtype()
    except UserError:  # The run itself refuses this base, with a message.
        return "", 0
    counts = weight_counts(model)
    mapped = counts["total"]
    if data.extra_tokens is not None:  # The tables get rows for the new tokens, so they are copied into memory.
        mapped -= counts["embedding"] + counts["head"]
    return {"F32": FLOAT32, "BF16": BFLOAT16}.get(file_dtype, ""), mapped


def _shapes(lengths: StepLengths, max_tokens: int | None) -> Shapes:
    return Shapes(lengths.sources, lengths.targets, lengths.is_complete, max_tokens)
