"""Stage 3: the rows of a run, prepared and opened; a model that fits their tokenizer; and how far the run is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.batches.loader import StepLoader
from data.prepare.encode import unknown_warning
from data.prepare.preparing import Prepared, in_child, prepare
from data.shards.store import TRAIN, VALIDATION
from data.tokenizers.tokenizer import Tokenizer
from model.formats.answering import ANSWERS_FILE, answer_list_of
from settings.consistency import REGRESSION, check, writes_answers
from settings.declared import Config, T5ModelConfig
from settings.errors import UserError, refuse
from settings.fields import AUTO, counted
from settings.loading import label
from settings.tasks import learns_labels, task_named
from support.language import join, say
from tasks.base import BaseTask
from training.checkpoints.state import TrainingState, read_training_state
from training.evaluation.stopping import LOSS, MeasuredOn
from training.report.heartbeat import PREPARING_FILE
from training.setup.answer_list import AnswerList, answer_sources, describe, read_list, unlisted_note
from training.setup.base import Start
from training.setup.resolved import ResolvedRun

TIMES_UNUSED = 2  # From so many rows of embeddings for each id of the tokenizer on, it is told that fewer do.
FEW_ROWS = 8  # An evaluation of fewer held-out rows says little.
ULTRA_BELOW_BYTES = 13 * 1000**3  # Where less memory is available, ultra_low_mem=auto reopens files for each read.


@dataclass(frozen=True)
class PreparedData:
    """The rows of a run, and what follows from them.

    Args:
        config: the settings, with what the data decide in them: objective, labels, vocabulary, how answers are written.
        task: what the rows teach.
        loader: of the training data; validation: of the held-out rows.
        answers: the list that answers come from; None: any can be.
        state: how far the run is.
        notes: what is said when the log is open.
    """

    config: Config
    prepared: Prepared
    tokenizer: Tokenizer
    task: BaseTask
    loader: StepLoader
    validation: StepLoader
    answers: AnswerList | None
    state: TrainingState
    notes: list[str]


def load_data(start: Start, resumed_dir: Path | None, available_bytes: int) -> PreparedData:
    """Prepare the rows in a child, open them with their tokenizer, and fit the model to it; read how far the run is.

    Args:
        resumed_dir: folder of the run that goes on; None: a new run.
        available_bytes: what the machine would give to this process.
    """
    config = start.config
    progress_note = Path(config.run.log_dir, config.run.run_name, PREPARING_FILE)
    prepared = in_child(prepare, config, progress_note, checked=(TRAIN, VALIDATION))
    task: BaseTask = task_named(prepared.objective)
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    decided: dict[str, Any] = {"objective": prepared.objective}
    if learns_labels(prepared.objective):
        decided["labels"] = ",".join(prepared.labels) or REGRESSION
        decided["class_weights"] = _class_weights(config.train.class_weights, prepared)
    notes: list[str] = []
    if start.folder is None:
        tokenizer_dir = config.data.tokenizer_dir
        vocabulary, notes = fitted_vocabulary(config.model, tokenizer, tokenizer_dir, task.writes_text, config.origin)
        decided |= vocabulary
    else:
        _refuse_other_tokenizer(config.data.tokenizer_dir, tokenizer, config.model)
    answers, of_answers = _load_answers(start, resumed_dir, task.writes_text, Path(prepared.tokenizer_dir))
    if answers is not None:
        decided |= answers.settings
    settings = config.with_changes(**decided)
    reopens = reopens_files(settings.memory.ultra_low_mem, available_bytes)
    loader, validation = (
        StepLoader(split, prepared.objective, settings.data, settings.model, settings.run.seed, reopens)
        for split in (prepared.train_dir, prepared.validation_dir)
    )
    refuse(check(settings))  # A metric may be of classes, and the labels are numbers.
    notes += of_answers
    notes += _notes_on_rows(start, settings.model, prepared, tokenizer, task)
    if 0 < validation.num_rows < FEW_ROWS and settings.data.validation_file is None:
        text = "only {rows} held out for evaluation, too few for reliable figures; give a --validation_file"
        notes.append(say(text, rows=counted(validation.num_rows, "row")))
    if answers is not None and writes_answers(settings.metrics) and start.checkpoint is None:
        notes += unlisted_note(answers.tree, validation, int(settings.metrics.eval_generate_rows))
    state = TrainingState() if start.checkpoint is None else read_training_state(start.checkpoint)
    measured = _measured_on(loader, validation, settings.train.eval_rows, settings.metrics.eval_generate_rows)
    state, of_changes = taken_up(state, measured, settings.train.metric_for_best)
    notes += of_changes
    return PreparedData(settings, prepared, tokenizer, task, loader, validation, answers, state, notes)


def reopens_files(ultra_low_mem: bool | str, available_bytes: int) -> bool:
    """Whether data files are opened anew for every read: `ultra_low_mem` with auto resolved.

    Args:
        available_bytes: what the machine would give to this process.
    """
    return available_bytes < ULTRA_BELOW_BYTES if ultra_low_mem == AUTO else bool(ultra_low_mem)


def _load_answers(
    start: Start, resumed_dir: Path | None, writes_text: bool, tokenizer_dir: Path
) -> tuple[AnswerList | None, list[str]]:
    """The list that answers come from, where one is named, and what is told of it; a run that goes on has its own."""
    files = start.config.answer.answers
    if files in (AUTO, None):
        own = None if start.model is None or start.is_resumed else start.model.answer_list
        if own is None or files is None or not writes_text:
            return None, []
        return None, [say("{file} is not used for the new model; --answers={file} keeps it", file=own)]
    if resumed_dir is not None:  # Its checkpoint keeps the list as well.
        files = str(answer_list_of(*filter(None, (resumed_dir, start.checkpoint))) or files)
    sources = answer_sources(str(files), None)
    answers = read_list(start.config, sources, tokenizer_dir)
    if answer_list_of(answers.folder) is None:
        raise UserError(
            "--answers = {asked}, has an answer of several lines, or with blanks around it, which the model's "
            "{answers_file} cannot hold; write each in one line",
            asked=files,
            answers_file=ANSWERS_FILE,
        )
    return answers, [describe(answers.tree, sources)]


def rolled_back(run: ResolvedRun, checkpoint: Path | None, now: TrainingState) -> ResolvedRun:
    """The same run, continuing from one of its checkpoints; None: from its beginning.

    Args:
        run: as it began. now: of which this lasts: the first evaluation, and what was left out on the way.
    Raises:
        UserError: the checkpoint holds no state.
    """
    if checkpoint is not None:
        assert run.state.measured_on is not None, "of a run that has begun"
        metric = run.config.train.metric_for_best
        saved, _ = taken_up(read_training_state(checkpoint), run.state.measured_on, metric)
        state = dataclasses.replace(saved, first_eval_loss=now.first_eval_loss, divergence=now.divergence)
        return run.starting_from(checkpoint, state, is_resumed=True)
    state = dataclasses.replace(run.state, first_eval_loss=now.first_eval_loss, divergence=now.divergence)
    best = now.best_metric
    if best is not None and best["step"] == 0:  # It is not evaluated again.
        best = {**best, "evals_since": 0}
        state = dataclasses.replace(state, best_metric=best, best_eval_loss=now.first_eval_loss)
    return run.starting_from(run.base, state, run.is_resumed)


def _notes_on_rows(
    start: Start, model: T5ModelConfig, prepared: Prepared, tokenizer: Tokenizer, task: BaseTask
) -> list[str]:
    """What is told of the rows, and of a head of the checkpoint that is not taken over, since it has other outputs."""
    notes: list[str] = []
    shape = None if start.model is None else start.model.shape
    is_kept = shape is None or (model.has_labels_of(shape) and shape.has_dense_head == model.has_dense_head)
    if shape is not None and shape.num_labels and not is_kept:
        text = "the head of {model} has other labels or layers, so a new head starts from random weights"
        notes.append(say(text, model=start.folder))
    if tokenizer.has_own_masks and task.needs_sentinels:
        text = (
            "spans are masked with ids {first}, {second}, ... as in ByT5's pretraining; in transformers, <extra_id_0> "
            "is a different id"
        )
        notes.append(say(text, first=tokenizer.sentinel_ids[0], second=tokenizer.sentinel_ids[1]))
    warning = unknown_warning(prepared.counts["train_unknown_tokens"], prepared.counts["train_tokens"])
    return notes if warning is None else [*notes, warning]


def _class_weights(class_weights: str | None, prepared: Prepared) -> str | None:
    """One weight for each class of the labels: balanced ones give all classes the same part in the loss."""
    if class_weights is None:
        return None
    names = prepared.labels
    counts = prepared.label_counts
    if not names:
        raise UserError(
            "--class_weights = {asked}, the labels are numbers and have no classes; omit it", asked=class_weights
        )
    if class_weights == "balanced":
        # A class without rows has no part in the loss, whatever its weight.
        weights = [sum(counts) / (len(names) * max(1, count)) for count in counts]
        return ",".join(f"{weight:.6g}" for weight in weights)
    num_weights = class_weights.count(",") + 1
    if num_weights != len(names):
        raise UserError(
            "--class_weights = {asked}, has {given} weights for {count} labels ({names}); give one for each label",
            asked=class_weights,
            given=num_weights,
            count=len(names),
            names=join(", ", names),
        )
    return class_weights


def rows_for(tokens: int) -> int:
    """Rows of a table for so many tokens."""
    return math.ceil(tokens / 64) * 64


def fitted_vocabulary(
    model: T5ModelConfig,
    tokenizer: Tokenizer,
    tokenizer_dir: str,
    writes_text: bool,
    origin: Callable[[str], str | None],
) -> tuple[dict[str, int], list[str]]:
    """The settings of a new model that has room for the tokenizer's tokens, and its ids of padding and end; and what is
    told.

    Args:
        model: as the settings say. origin: where a setting is from, as `Config.origin`.
        tokenizer_dir: of the settings, for messages.
        writes_text: else the table of embeddings has no other use than the tokens of the data, and gets no more rows.
    Raises:
        UserError: the user has named too small a table, or other ids.
    """
    is_named = origin("vocab_size") in ("flag", "file", "edited")
    settings: dict[str, int] = {}
    notes: list[str] = []
    fitting = rows_for(tokenizer.size)
    if tokenizer.size > model.vocab_size:
        if is_named:
            raise UserError(
                "--vocab_size = {vocab_size}, is less than the {size} tokens of the tokenizer (--tokenizer_dir = "
                "{tokenizer_dir}); omit it, or name {fitting}",
                vocab_size=model.vocab_size,
                size=tokenizer.size,
                tokenizer_dir=tokenizer_dir,
                fitting=fitting,
            )
        settings["vocab_size"] = fitting
        text = "vocab_size = {rows}, to fit the tokenizer's {tokens} tokens"
        notes.append(say(text, rows=fitting, tokens=tokenizer.size))
    elif not is_named and not writes_text:
        settings["vocab_size"] = fitting
    elif not is_named and TIMES_UNUSED * tokenizer.size <= model.vocab_size:
        text = (
            "the tokenizer has {tokens} ids, the model {rows} embedding rows: --vocab_size={fitting} saves {weights} "
            "parameters"
        )
        weights = f"{(model.vocab_size - fitting) * model.d_model:,}"
        notes.append(
            say(text, tokens=f"{tokenizer.size:,}", rows=f"{model.vocab_size:,}", fitting=fitting, weights=weights)
        )
    ids = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id}
    text = "{setting} = {value}, the tokenizer has {own}; omit it"
    # A file may be what a run has saved, so its ids give way.
    problems = [
        say(text, setting=label(name, origin(name)), value=getattr(model, name), own=own)
        for name, own in ids.items()
        if origin(name) in ("flag", "edited") and getattr(model, name) != own
    ]
    refuse(problems)
    return settings | ids, notes


def _refuse_other_tokenizer(tokenizer_dir: str, tokenizer: Tokenizer, model: T5ModelConfig) -> None:
    """Refuse a tokenizer that is not the one of the model which a run starts from; raises UserError."""
    if tokenizer.size > model.vocab_size:
        raise UserError(
            "--tokenizer_dir = {tokenizer_dir}, has {size} tokens and the model {vocab_size}: it does not match; "
            "use the tokenizer that the model was trained with, and name new tokens by --extra_tokens",
            tokenizer_dir=tokenizer_dir,
            size=tokenizer.size,
            vocab_size=model.vocab_size,
        )
    if (tokenizer.pad_id, tokenizer.eos_id) != (model.pad_token_id, model.eos_token_id):
        raise UserError(
            "--tokenizer_dir = {tokenizer_dir}, has pad {pad_id} and eos {eos_id}, the model {pad_token_id} and "
            "{eos_token_id}: it does not match; use the model's own tokenizer",
            tokenizer_dir=tokenizer_dir,
            pad_id=tokenizer.pad_id,
            eos_id=tokenizer.eos_id,
            pad_token_id=model.pad_token_id,
            eos_token_id=model.eos_token_id,
        )


def _measured_on(train: StepLoader, held_out: StepLoader, eval_rows: int, answered_rows: int | str) -> dict[str, Any]:
    """What the evaluations of a run mean, as its state keeps it: the fields of `MeasuredOn`. Reads 256 rows of each."""
    answered = 0 if answered_rows == AUTO else min(int(answered_rows), held_out.num_rows)
    content = train.content() + held_out.content()
    read = min(eval_rows, held_out.num_rows)
    return dataclasses.asdict(MeasuredOn(content, train.num_rows, held_out.num_rows, read, answered))


def taken_up(state: TrainingState, now: dict[str, Any], metric: str) -> tuple[TrainingState, list[str]]:
    """A saved state over the rows of now: without its best numbers where they were measured on others.

    A file of data may have grown or changed since, or an evaluation may read more of it. What is compared are the rows
    themselves: the same ones may lie elsewhere, or have been prepared again.

    Args:
        now: the fields of `MeasuredOn`.
        metric: which number decides; see `BestMetric`.
    Returns:
        the state, and what is to be told.
    """
    before = state.measured_on
    state = dataclasses.replace(state, measured_on=now)
    if before is None:  # The run begins.
        return state, []
    if before["content"] != now["content"]:
        text = (
            "the data has changed since this run was saved: from {before} and {held_out} held out to {now} "
            "and {now_held_out}; rows held out before may now be trained on, and the best evaluation is "
            "reset"
        )
        note = say(
            text,
            before=counted(before["train_rows"], "row"),
            held_out=f"{before['held_out_rows']:,}",
            now=counted(now["train_rows"], "row"),
            now_held_out=f"{now['held_out_rows']:,}",
        )
        return dataclasses.replace(state, best_eval_loss=None, best_evaluation=None, best_metric=None), [note]
    # Where no answers are written, a score is one of all rows that are read.
    decisive_rows = "answered_rows" if now["answered_rows"] and metric.rpartition("/")[2] != LOSS else "eval_rows"
    notes: list[str] = []
    measured: list[tuple[str, str, dict[str, Any]]] = [
        (LOSS, "eval_rows", {"best_eval_loss": None, "best_evaluation": None}),
        (metric, decisive_rows, {"best_metric": None}),
    ]
    for name, rows, best_numbers in measured:
        if before[rows] != now[rows]:
            state = dataclasses.replace(state, **best_numbers)
            text = "the best {metric} is reset: it was measured on {before}, and is now measured on {now}"
            notes.append(say(text, metric=name, before=counted(before[rows], "row"), now=counted(now[rows], "row")))
    return state, list(dict.fromkeys(notes))
