"""Stage 2: the weights that a run starts from, and what follows from them: shape, tokenizer, adapters, how answers are written.

What the folder says is taken over at once: what the user may not choose otherwise, and a layer of settings under those that the user
has named (`training.saved_model`). Nothing is loaded, but for the headers of files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from data.prepare.data_tokenizer import read_extra_tokens
from data.prepare.training_data import file_problems
from data.tokenizers.tokenizer import Tokenizer
from language import say
from model.formats.checksums import refuse_damaged
from model.formats.headers import TensorHeaders
from model.formats.shape_file import misfits, read_config
from settings.consistency import check, ranking_problems, writes_answers
from settings.declared import Config, T5ModelConfig
from settings.errors import UserError, refuse
from settings.fields import AUTO, counted
from settings.loading import label
from settings.tasks import command_of
from training.checkpoints.folder import Checkpoints
from training.evaluation.scores import check_decisive, metric_names
from training.saved_model import INHERITED_ANSWERS, SHAPE_SETTINGS, SavedModel, saved_note
from training.setup.adapter_settings import check_trained
from training.setup.resolved import ResolvedRun
from training.setup.start import choose_start


def find_base(run: ResolvedRun, reads_weights: bool = True) -> None:
    """Decide which weights a run starts from, and take over its shape, tokenizer, adapters' form and way of answering.

    Args:
        reads_weights: compare the files with their checksums, which reads them once.
    Raises:
        UserError: what was named is not there, damaged, of another shape, or the adapters cannot stand on it.
    """
    config = run.config
    metric_names(
        config.metrics.metrics, config.answer.num_answers
    )  # Unknown names would be found at the first evaluation, or never.
    best, validation_file = config.train.metric_for_best, config.data.validation_file
    check_decisive(best, validation_file, run.metrics, config.task.scores, writes_answers(config.metrics))
    try:
        folder, notes = choose_start(config, run.resumed_dir)
    except UserError as error:
        # Files may be missing as well, and would be told only once this is mended.
        raise UserError(*error.problems, *file_problems(config.data)) from None
    run.told += notes
    run.base = folder
    start = run.start
    if run.resumed_dir is None:
        _refuse_to_replace_its_start(config, start)
    decided = _resolved_start(run)
    layer: dict[str, Any] = {}
    if start is not None:
        if reads_weights:
            # A checkpoint of a run that goes on was compared before.
            for path in start.folders if run.resumed_dir is None else [start.base]:
                refuse_damaged(path, "finetune_from")
        layer = _inherited(start, run)
        decided |= _conditions(start, run)
    run.config = config.with_saved(layer).changed(**decided)
    if run.resumed_dir is None:
        run.notes += saved_note(run.config)
    if start is not None:
        refuse(check(run.config))  # A decoder of the checkpoint allows one head alone.
    config = run.config
    refuse(ranking_problems(config.metrics.metrics, config.answer.num_answers, config.generate.num_beams))
    refuse(check_trained(run.config, folder))


def _resolved_start(run: ResolvedRun) -> dict[str, Any]:
    """`finetune_from` as a new run keeps it, so that a resume before its first checkpoint chooses the same."""
    train = run.config.train
    needs_start = train.is_finetune or command_of(run.config.data.objective) == "dpo"
    if run.resumed_dir is not None:
        return {}
    if train.finetune_from == AUTO and needs_start:
        return {"finetune_from": None if run.base is None else str(run.base.absolute())}
    if str(train.finetune_from).startswith("hf://"):
        return {"finetune_from": str(run.base)}
    return {}


def _refuse_to_replace_its_start(config: Config, start: SavedModel | None) -> None:
    """A new run that takes the place of another may not start from what goes with it."""
    replaced = Path(config.run.output_dir, config.run.run_name).resolve()
    folders = [] if start is None else start.folders
    if config.data.tokenizer_dir != AUTO:
        folders = [*folders, Path(config.data.tokenizer_dir)]
    for folder in folders:
        if folder.resolve().is_relative_to(replaced):
            raise UserError(
                "--run_name = {run}, would replace {folder}, which this run starts from; choose another run",
                run=config.run.run_name,
                folder=folder,
            )


def _conditions(start: SavedModel, run: ResolvedRun) -> dict[str, Any]:
    """The shape and the tokenizer of the start, which the user cannot choose otherwise.

    Raises:
        UserError: the user has named another shape, or the files are not of the shape that they speak of.
    """
    config = run.config
    shape = _shape_of_start(start, config)
    tokenizer_dir = config.data.tokenizer_dir
    if run.resumed_dir is None:
        # Adapters may have more rows than the table of their base.
        as_stored = dataclasses.replace(shape, vocab_size=read_config(start.base).vocab_size)
        problems = misfits(TensorHeaders(start.base), as_stored)
        refuse([say("--finetune_from = {problem}", problem=problem) for problem in problems])
    else:
        # A run that was stopped before its first checkpoint begins again with the model that it started from.
        run.is_resumed = start.folder.parent == Checkpoints(run.resumed_dir, 1).folder
        # On another machine the tokenizer may be gone, unless this start names it; the checkpoint has the same files.
        if config.origin("tokenizer_dir") != "flag" and not Path(tokenizer_dir).exists():
            tokenizer_dir = AUTO
    if tokenizer_dir == AUTO:
        tokenizer_dir = str(start.tokenizer)
    settings = {name: getattr(shape, name) for name in SHAPE_SETTINGS}
    return {**settings, "tokenizer_dir": tokenizer_dir, **_added_tokens(run, shape.vocab_size, tokenizer_dir)}


def _inherited(start: SavedModel, run: ResolvedRun) -> dict[str, Any]:
    """What the start says of the form of its adapter and of its answers, for where the user has named nothing."""
    settings = start.adapter_form
    if not run.config.model.is_text:
        return settings
    answers, problems = start.answer_settings(run.config)
    if run.resumed_dir is None:  # What the first start of a run has told is not repeated.
        run.notes += [say("{problem}; the new model does not use it", problem=problem) for problem in problems]
        run.notes += start.unknown_key_notes
    return settings | {name: answers[name] for name in INHERITED_ANSWERS if name in answers}


def _shape_of_start(start: SavedModel, config: Config) -> T5ModelConfig:
    """The shape that a run has from its start.

    Raises:
        UserError: the user has chosen another one, each setting with its value there.
    """
    shape = start.shape_for(config)
    values = config.as_dict()
    refuse(
        [
            say(
                "{setting} = {value}, the checkpoint {base} has a different shape ({other_value}); omit it",
                setting=label(name, config.origin(name)),
                value=values[name],
                base=start.folder,
                other_value=getattr(shape, name),
            )
            for name in start.shape_conflicts(config)
            if config.given(name)
        ]
    )
    return shape


def _added_tokens(run: ResolvedRun, vocab_size: int, tokenizer_dir: str) -> dict[str, Any]:
    """The settings of a model that has rows for the tokens of `extra_tokens` which the tokenizer of its base lacks."""
    file = run.config.data.extra_tokens
    if file is None:
        return {}
    tokenizer = Tokenizer.load(tokenizer_dir)
    count = sum(tokenizer.token_to_id(token) is None for token in read_extra_tokens(file))
    if not count:
        return {}
    first = tokenizer.size
    last = first + count - 1
    if run.resumed_dir is None:
        text = "{tokens} of {file} added as ids {first} to {last}; they start as the mean of their pieces"
        run.notes.append(say(text, tokens=counted(count, "token"), file=file, first=first, last=last))
    settings: dict[str, Any] = {"vocab_size": max(vocab_size, last + 1)}
    if run.config.lora.lora_rank and run.config.lora.lora_tokens == AUTO:
        settings["lora_tokens"] = f"{first}-{last}"
    return settings
