"""Stage 3: the rows of a run, prepared and opened; a model that fits their tokenizer; and how far the run is."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from data.batches.loader import StepLoader
from data.prepare.encode import unknown_warning
from data.prepare.preparing import Prepared, in_child, prepare
from data.shards.store import TRAIN, VALIDATION
from data.sources.files import find
from data.tokenizers.tokenizer import Tokenizer
from language import join, say
from model.formats.answering import ANSWERS_FILE, answer_list_of
from settings.consistency import REGRESSION, check, writes_answers
from settings.declared import Config
from settings.errors import UserError, refuse
from settings.fields import AUTO, counted
from settings.loading import label
from settings.tasks import learns_labels, task_named
from training.checkpoints.state import TrainingState, read_training_state
from training.evaluation.stopping import LOSS, MeasuredOn, needs_answers
from training.report.heartbeat import PREPARING_FILE
from training.setup.answer_list import describe, read_list, unlisted_note
from training.setup.resolved import ResolvedRun

TIMES_UNUSED = 2  # as many ids as the tokenizer has, from which a model's room for more is told
FEW_ROWS = 8  # held out, below which an evaluation says little
ULTRA_BELOW_BYTES = 13 * 1000**3  # available memory below which ultra_low_mem=auto reopens files for each read


def load_data(run: ResolvedRun) -> None:
    """Prepare the rows in a child, open them with their tokenizer, and fit the model to it; read how far the run is."""
    config = run.config
    note = Path(config.run.log_dir, config.run.run_name, PREPARING_FILE)
    run.prepared = in_child(prepare, config, note, (TRAIN, VALIDATION))
    prepared = run.prepared
    run.tokenizer = tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    run.task = task_named(prepared.objective)
    decided: dict[str, Any] = {}
    if learns_labels(prepared.objective):
        decided["labels"] = ",".join(prepared.labels) or REGRESSION
        decided["class_weights"] = _class_weights(config.train.class_weights, prepared)
    vocabulary, notes = _fitted_vocabulary(config, tokenizer, run.base)
    run.notes += notes
    answers = _load_answers(run)
    run.config = config = config.changed(**decided, **vocabulary, **answers)
    if learns_labels(prepared.objective):
        refuse(check(config))  # A metric may be of classes, and the labels are numbers.
        run.notes += _new_head_note(run)
    if tokenizer.has_own_masks and prepared.objective in ("span", "ul2", "denoise"):
        told = (
            "spans are masked with ids {first}, {second}, ... as in ByT5's pretraining; in transformers, <extra_id_0> "
            "is a different id"
        )
        run.notes.append(say(told, first=tokenizer.sentinel_ids[0], second=tokenizer.sentinel_ids[1]))
    if warning := unknown_warning(prepared.counts["train_unknown_tokens"], prepared.counts["train_tokens"]):
        run.notes.append(warning)
    reopen = reopens_files(config, run.budget.available_bytes)
    splits = prepared.train_dir, prepared.validation_dir
    run.loader, run.validation = (
        StepLoader(split, prepared.objective, config.data, config.model, config.run.seed, reopen) for split in splits
    )
    if 0 < run.validation.num_rows < FEW_ROWS and config.data.validation_file is None:
        held_out = counted(run.validation.num_rows, "row")
        told = "only {rows} held out for evaluation, too few for reliable figures; give a --validation_file"
        run.notes.append(say(told, rows=held_out))
    if run.tree is not None and writes_answers(config.metrics) and not run.is_resumed:
        run.notes += unlisted_note(run.tree, run.validation, int(config.metrics.eval_generate_rows))
    if run.is_resumed and run.base is not None:
        run.state = read_training_state(run.base)
    measured = measured_on(config, run.loader, run.validation)
    run.state, changes = taken_up(run.state, measured, config.train.metric_for_best)
    run.notes += changes


def reopens_files(config: Config, available_bytes: int) -> bool:
    """Whether data files are opened anew for every read: `ultra_low_mem` with auto resolved.

    Args:
        available_bytes: what the machine would give to this process.
    """
    asked = config.memory.ultra_low_mem
    return available_bytes < ULTRA_BELOW_BYTES if asked == AUTO else bool(asked)


def _load_answers(run: ResolvedRun) -> dict[str, Any]:
    """Open the list that answers come from, where one is named, and return the settings that suit it; a run that goes on has its own."""
    files = run.config.answer.answers
    if files in (AUTO, None):
        own = run.start.answer_list if run.start is not None and not run.is_resumed else None
        if own is not None and files == AUTO and run.task.writes_text:
            text = "{file} is not used for the new model; --answers={file} keeps it"
            run.notes.append(say(text, file=own))
        return {}
    own = None
    if run.resumed_dir is not None:
        own = answer_list_of(run.resumed_dir, *([run.base] if run.is_resumed and run.base else []))
    sources = find(str(own or files), "--answers")
    settings, run.tree, run.listed_in = read_list(run.config, sources, Path(run.prepared.tokenizer_dir))
    if answer_list_of(run.listed_in) is None:
        raise UserError(
            "--answers = {asked}, has an answer of several lines, or with blanks around it, which the model's "
            "{answers_file} cannot hold; write each in one line",
            asked=files,
            answers_file=ANSWERS_FILE,
        )
    run.notes.append(describe(run.tree, sources))
    return settings


def rolled_back(run: ResolvedRun, checkpoint: Path | None, now: TrainingState) -> ResolvedRun:
    """The same run, continuing from one of its checkpoints; None: from its beginning.

    Args:
        run: as it began. now: of which this lasts: the first evaluation, and what was left out on the way.
    Raises:
        UserError: the checkpoint holds no state.
    """
    base, state, is_resumed = run.base, run.state, run.is_resumed
    if checkpoint is not None:
        assert state.measured_on is not None, "of a run that has begun"
        saved, _ = taken_up(read_training_state(checkpoint), state.measured_on, run.config.train.metric_for_best)
        base, state, is_resumed = checkpoint, saved, True
    state = dataclasses.replace(state, first_eval_loss=now.first_eval_loss, divergence=now.divergence)
    if checkpoint is None and now.best_metric is not None and now.best_metric["step"] == 0:  # it is not evaluated again
        best, first = {**now.best_metric, "evals_since": 0}, now.first_eval_loss
        state = dataclasses.replace(state, best_metric=best, best_eval_loss=first)
    return run.starting_from(base, state, is_resumed)


def _new_head_note(run: ResolvedRun) -> list[str]:
    """That a head of the checkpoint is not taken over, since it has other outputs."""
    if run.start is None or run.is_resumed:
        return []
    shape = run.start.shape
    model = run.config.model
    if not shape.num_labels or (model.has_labels_of(shape) and shape.has_dense_head == model.has_dense_head):
        return []
    text = "the head of {model} has other labels or layers: a new one starts from random weights"
    return [say(text, model=run.base)]


def _class_weights(asked: str | None, prepared: Prepared) -> str | None:
    """One weight for each class of the labels: balanced ones give all classes the same part in the loss."""
    if asked is None:
        return None
    names, counts = prepared.labels, prepared.label_counts
    if not names:
        raise UserError("--class_weights = {asked}, the labels are numbers and have no classes; omit it", asked=asked)
    if asked == "balanced":
        weights = [sum(counts) / (len(names) * count) if count else 1.0 for count in counts]
        return ",".join(f"{weight:.6g}" for weight in weights)
    if (given := asked.count(",") + 1) != len(names):
        raise UserError(
            "--class_weights = {asked}, are {given} and the labels {count} ({names}); give one for each",
            asked=asked,
            given=given,
            count=len(names),
            names=join(", ", names),
        )
    return asked


def fits_table(config: Config) -> bool:
    """Whether a new model's table of embeddings has a row for each token of the data and no more: an encoder's has no other use."""
    return not config.given("vocab_size") and not config.task.writes_text


def rows_for(tokens: int) -> int:
    """Rows of a table for so many tokens."""
    return math.ceil(tokens / 64) * 64


def _fitted_vocabulary(config: Config, tokenizer: Tokenizer, base: Path | None) -> tuple[dict[str, int], list[str]]:
    """The settings of a model that has room for the tokenizer's tokens, and its ids of padding and end; and what is told."""
    model = config.model
    settings: dict[str, int] = {}
    notes: list[str] = []
    fitting = rows_for(tokenizer.size)
    if tokenizer.size > model.vocab_size:
        if base is None and config.given("vocab_size"):
            raise UserError(
                "--vocab_size = {vocab_size}, is less than the {size} tokens of the tokenizer (--tokenizer_dir = "
                "{tokenizer_dir}); omit it, or name {fitting}",
                vocab_size=model.vocab_size,
                size=tokenizer.size,
                tokenizer_dir=config.data.tokenizer_dir,
                fitting=fitting,
            )
        if base is not None:
            raise UserError(
                "--tokenizer_dir = {tokenizer_dir}, has {size} tokens and the model {vocab_size}: it does not match; "
                "use the tokenizer that the model was trained with, and name new tokens by --extra_tokens",
                tokenizer_dir=config.data.tokenizer_dir,
                size=tokenizer.size,
                vocab_size=model.vocab_size,
            )
        settings["vocab_size"] = fitting
        text = "vocab_size = {rows}, to fit the tokenizer's {tokens} tokens"
        notes.append(say(text, rows=fitting, tokens=tokenizer.size))
    elif base is None and fits_table(config):
        settings["vocab_size"] = fitting
    elif base is None and not config.given("vocab_size") and TIMES_UNUSED * tokenizer.size <= model.vocab_size:
        told = (
            "the tokenizer has {tokens} ids, the model {rows} embedding rows: --vocab_size={fitting} saves {weights} "
            "parameters"
        )
        weights = f"{(model.vocab_size - fitting) * model.d_model:,}"
        notes.append(
            say(told, tokens=f"{tokenizer.size:,}", rows=f"{model.vocab_size:,}", fitting=fitting, weights=weights)
        )
    if (tokenizer.pad_id, tokenizer.eos_id) != (model.pad_token_id, model.eos_token_id):
        if base is not None:
            raise UserError(
                "--tokenizer_dir = {tokenizer_dir}, has pad {pad_id} and eos {eos_id}, the model {pad_token_id} and "
                "{eos_token_id}: it does not match; use the model's own tokenizer",
                tokenizer_dir=config.data.tokenizer_dir,
                pad_id=tokenizer.pad_id,
                eos_id=tokenizer.eos_id,
                pad_token_id=model.pad_token_id,
                eos_token_id=model.eos_token_id,
            )
        ids = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id}
        # A file may be what a run has saved, so its ids give way.
        named = [
            name for name in ids if config.origin(name) in ("flag", "edited") and getattr(model, name) != ids[name]
        ]
        if named:
            text = "{setting} = {value}, the tokenizer has {own}; omit it"
            raise UserError(
                *(
                    say(text, setting=label(name, config.origin(name)), value=getattr(model, name), own=ids[name])
                    for name in named
                )
            )
        settings |= ids
    return settings, notes


def measured_on(config: Config, train: StepLoader, held_out: StepLoader) -> dict[str, Any]:
    """What the evaluations of a run mean, as its state keeps it: the fields of `MeasuredOn`. Reads 256 rows of each."""
    asked = config.metrics.eval_generate_rows
    answered = 0 if asked == AUTO else min(int(asked), held_out.num_rows)
    read = min(config.train.eval_rows, held_out.num_rows)
    content = train.content() + held_out.content()
    return dataclasses.asdict(MeasuredOn(content, train.num_rows, held_out.num_rows, read, answered))


def taken_up(state: TrainingState, now: dict[str, Any], metric: str) -> tuple[TrainingState, list[str]]:
    """A saved state over the rows of now: without its best numbers where they were measured on others.

    A file of data may have grown or changed since, or an evaluation may read more of it. What is compared are the rows themselves:
    the same ones may lie elsewhere, or have been prepared again.

    Args:
        now: of `measured_on`.
        metric: which number decides; see `BestMetric`.
    Returns:
        the state, and what is to be told.
    """
    before, state = state.measured_on, dataclasses.replace(state, measured_on=now)
    if before is None:  # of a run that begins
        return state, []
    is_other = before["content"] != now["content"]
    is_loss_anew = is_other or before["eval_rows"] != now["eval_rows"]
    is_score_anew = is_other or before["answered_rows"] != now["answered_rows"]
    if is_loss_anew:
        state = dataclasses.replace(state, best_eval_loss=None, best_evaluation=None)
    if is_score_anew if needs_answers(metric) else is_loss_anew:
        state = dataclasses.replace(state, best_metric=None)
    if is_other:
        told = (
            "the data has changed since this run was saved: from {before} and {held_out} held out to {now} and "
            "{now_held_out}; rows held out before may now be trained on, and the best evaluation starts over"
        )
        rows = {"before": counted(before["train_rows"], "row"), "now": counted(now["train_rows"], "row")}
        held_out = {"held_out": f"{before['held_out_rows']:,}", "now_held_out": f"{now['held_out_rows']:,}"}
        return state, [say(told, **rows, **held_out)]
    compared = [(LOSS, "eval_rows")] * is_loss_anew + [(metric, "answered_rows")] * (
        is_score_anew and needs_answers(metric)
    )
    told = "the best {metric} starts over: it was measured on {before}, and is now measured on {now}"
    return state, [
        say(told, metric=name, before=counted(before[rows], "row"), now=counted(now[rows], "row"))
        for name, rows in compared
    ]
