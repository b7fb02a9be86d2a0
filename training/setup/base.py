"""Stage 2: the weights that a run starts from, and what follows from them: shape, tokenizer, adapters, how answers are
written.

What the folder says is taken over at once: what the user may not choose otherwise, and a layer of settings under those
that the user has named (`training.saved_model`). Nothing is loaded, but for the headers of files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.language import say
from data.prepare.data_tokenizer import read_extra_tokens
from data.prepare.training_data import file_problems
from data.tokenizers.tokenizer import Tokenizer
from model.formats.checksums import refuse_damaged
from model.formats.headers import TensorHeaders
from model.formats.shape_file import misfits, read_config
from settings.consistency import check, ranking_problems, writes_answers
from settings.declared import Config, LoraConfig, T5ModelConfig
from settings.errors import UserError, refuse
from settings.fields import AUTO, counted
from settings.loading import label
from training.checkpoints.folder import Checkpoints
from training.evaluation.scores import check_decisive, metric_names
from training.saved_model import INHERITED_ANSWERS, SHAPE_SETTINGS, SavedModel, saved_note
from training.setup.adapter_settings import check_trained
from training.setup.start import choose_start


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Args:
        config: the settings, with what follows from the start in them.
        folder: of the weights; None: they are random.
        model: what that folder says.
        moved_base: where the base of an adapter lies now; None: where the adapter says.
        is_resumed: it is a checkpoint of this very run.
        reasons: what is told of a choice that the user did not make.
        notes: what else is told of the start.
    """

    config: Config
    folder: Path | None
    model: SavedModel | None
    moved_base: str | None
    is_resumed: bool
    reasons: list[str]
    notes: list[str]

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint of this very run that it goes on from; None: it begins."""
        return self.folder if self.is_resumed else None


def find_base(
    config: Config,
    run_dir: Path,
    resumed_dir: Path | None = None,
    own_metrics: Collection[str] = (),
    reads_weights: bool = True,
) -> Start:
    """Decide which weights a run starts from, and take over its shape, tokenizer, adapters' form and way of answering.

    Args:
        run_dir: folder of the run, which need not be there. resumed_dir: the same for a run that goes on; None: a new
            run.
        own_metrics: names of the user's own metrics.
        reads_weights: compare the files with their checksums, which reads them once.
    Raises:
        UserError: what was named is not there, damaged, of another shape, or the adapters cannot stand on it.
    """
    train = config.train
    metrics = config.metrics
    num_answers = config.answer.num_answers
    metric_names(metrics.metrics, num_answers)  # Unknown names would be found at the first evaluation, or never.
    label_scores = config.task.scores
    held_out = config.data.validation_file
    check_decisive(train.metric_for_best, held_out, own_metrics, label_scores, writes_answers(metrics))
    reasons: list[str] = []
    folder = None
    if resumed_dir is not None:
        folder = Checkpoints(resumed_dir, train.keep_latest_n_ckp).latest()
    is_resumed = folder is not None
    if resumed_dir is not None and not is_resumed:
        text = "{run} was stopped before its first checkpoint and starts again from step 1"
        reasons.append(say(text, run=resumed_dir.name))
    if not is_resumed:
        try:
            folder, of_choice = choose_start(config)
        except UserError as error:
            # Files may be missing as well, and would be told only once this is mended.
            raise UserError(*error.problems, *file_problems(config.data)) from None
        reasons += of_choice
    # Where a run goes on, the folder that this start names is the base of its adapters.
    moved_base = str(train.finetune_from) if is_resumed and config.origin("finetune_from") == "flag" else None
    model = None if folder is None else SavedModel.read(folder, moved_base=moved_base)
    layer: dict[str, Any] = {}
    conditions: dict[str, Any] = {"run_name": run_dir.name}
    notes: list[str] = []
    if resumed_dir is None:
        _refuse_to_replace_its_start(run_dir, model, config.data.tokenizer_dir)
        # A resume before the first checkpoint starts from the same weights.
        conditions["finetune_from"] = None if folder is None else str(folder)
        conditions["is_keep_training"] = False
    if model is not None:
        if reads_weights:
            for path in model.folders:
                refuse_damaged(path, "finetune_from")
        shape = model.shape_for(config.model, config.given)
        problems = [
            say(
                "{setting} = {value}, the checkpoint {base} has a different shape ({other_value}); omit it",
                setting=label(name, config.origin(name)),
                value=getattr(config.model, name),
                base=folder,
                other_value=getattr(shape, name),
            )
            for name in model.shape_conflicts(config.model, config.origin)
            if config.given(name)
        ]
        refuse(problems)
        tokenizer_dir = config.data.tokenizer_dir
        if resumed_dir is None:
            _refuse_other_files(model.base, shape)
        elif config.origin("tokenizer_dir") != "flag" and not Path(tokenizer_dir).exists():
            tokenizer_dir = AUTO  # On another machine the tokenizer may be gone; the checkpoint has the same files.
        if tokenizer_dir == AUTO:
            tokenizer_dir = str(model.tokenizer)
        conditions |= {name: getattr(shape, name) for name in SHAPE_SETTINGS}
        conditions["tokenizer_dir"] = tokenizer_dir
        if config.data.extra_tokens is not None:
            added, of_tokens = _added_tokens(config.data.extra_tokens, tokenizer_dir, shape.vocab_size, config.lora)
            conditions |= added
            notes += of_tokens
        layer = model.adapter_form
        if config.task.writes_text:
            answers, unusable = model.answer_settings(config)
            layer |= {name: answers[name] for name in INHERITED_ANSWERS if name in answers}
            notes += [say("{problem}; the new model does not use it", problem=problem) for problem in unusable]
            notes += model.unknown_key_notes
    settings = config.with_saved(layer, **conditions)
    refuse(check(settings))  # A decoder of the start allows one head alone.
    refuse(ranking_problems(metrics.metrics, num_answers, settings.generate.num_beams))
    refuse(check_trained(settings.model, settings.lora, settings.train.freeze, folder))
    notes += saved_note(settings.as_dict(), settings.origin)
    if resumed_dir is not None:
        notes = []  # The first start of the run has said them.
    return Start(settings, folder, model, moved_base, is_resumed, reasons, notes)


def _refuse_to_replace_its_start(run_dir: Path, model: SavedModel | None, tokenizer_dir: str) -> None:
    """A new run that takes the place of another may not start from what goes with it."""
    folders = [] if model is None else model.folders
    for folder in [*folders, Path(tokenizer_dir)]:
        if folder.resolve().is_relative_to(run_dir.resolve()):
            raise UserError(
                "--run_name = {run}, would replace {folder}, which this run starts from; choose another run",
                run=run_dir.name,
                folder=folder,
            )


def _refuse_other_files(base: Path, shape: T5ModelConfig) -> None:
    """Refuse weights that are not of the shape which their folder speaks of; raises UserError."""
    # Adapters may have more rows than the table of their base.
    as_stored = dataclasses.replace(shape, vocab_size=read_config(base).vocab_size)
    problems = misfits(TensorHeaders(base), as_stored)
    refuse([say("--finetune_from = {problem}", problem=problem) for problem in problems])


def _added_tokens(file: str, tokenizer_dir: str, vocab_size: int, lora: LoraConfig) -> tuple[dict[str, Any], list[str]]:
    """The settings of a model with rows for the tokens of `extra_tokens` that the tokenizer of its base lacks; and what
    is told.
    """
    tokenizer = Tokenizer.load(tokenizer_dir)
    count = sum(tokenizer.token_to_id(token) is None for token in read_extra_tokens(file))
    if not count:
        return {}, []
    first = tokenizer.size
    last = first + count - 1
    settings: dict[str, Any] = {"vocab_size": max(vocab_size, last + 1)}
    if lora.lora_rank and lora.lora_tokens == AUTO:
        settings["lora_tokens"] = f"{first}-{last}"
    text = "{tokens} of {file} added as ids {first} to {last}; they start as the mean of their pieces"
    return settings, [say(text, tokens=counted(count, "token"), file=file, first=first, last=last)]
