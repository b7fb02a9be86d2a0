"""Stage 2: the weights that a run starts from, and the settings that they decide: shape, tokenizer, adapters and how
answers are generated.

The folder of the weights gives two kinds of settings (`training.saved_model`): some are fixed whatever the user set, as
the shape; the others apply unless the user set them. No weights are loaded: only file headers and checksums are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from support.language import say
from training.checkpoints.folder import Checkpoints
from training.evaluation.scores import check_decisive, metric_names
from training.saved_model import INHERITED_ANSWERS, READING_SETTINGS, SHAPE_SETTINGS, SavedModel, saved_note
from training.setup.adapter_settings import check_trained
from training.setup.start import choose_start


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Args:
        config: the settings, with those that the weights decide.
        folder: folder of the weights; None: random weights.
        model: what that folder says of its model.
        moved_base: folder of an adapter's base, if it is not where the adapter says; else None.
        is_resumed: whether `folder` is a checkpoint of this very run.
        reasons: messages on why this start was chosen, where the user did not name it.
        notes: further messages on the start.
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
        """The checkpoint of this very run to resume from; None: the run begins at step 1."""
        return self.folder if self.is_resumed else None


def find_base(
    config: Config,
    run_dir: Path,
    resumed_dir: Path | None = None,
    own_metrics: Collection[str] = (),
    reads_weights: bool = True,
) -> Start:
    """Decide which weights a run starts from, and take from them the settings that they decide.

    There are three cases: random weights, which decide nothing; the folder of a model, whether it was published, is of
    an own run or holds adapters; and the newest checkpoint of a run that is resumed.

    Args:
        run_dir: folder of the run, which need not exist.
        resumed_dir: the same folder if the run is resumed; None: a new run.
        own_metrics: names of the user's own metrics.
        reads_weights: whether to verify the checksums of the weights, which reads all of them once.
    Raises:
        UserError: the weights are missing, damaged or of another shape, or the adapters do not fit them.
    """
    _check_metrics(config, own_metrics)
    folder, is_resumed, reasons = _choose_folder(config, resumed_dir)
    fixed: dict[str, Any] = {"run_name": run_dir.name}
    if resumed_dir is None:
        # Saved with the run, so that a resume before the first checkpoint starts from the same weights.
        fixed["finetune_from"] = None if folder is None else str(folder)
        fixed["is_keep_training"] = False
    model = None
    moved_base = None
    decided = Decided()
    if folder is not None:
        if is_resumed and config.origin("finetune_from") == "flag":
            # The weights are those of the checkpoint: the flag can only say where the base of its adapters is now.
            moved_base = str(config.train.finetune_from)
        model = SavedModel.read(folder, moved_base=moved_base)
        if reads_weights:
            for path in model.folders:
                refuse_damaged(path, "finetune_from")
        decided = _decided_by(model, config, is_new=resumed_dir is None)
    if resumed_dir is None:
        _refuse_to_delete_start(run_dir, model, config.data.tokenizer_dir)
    settings = config.with_saved(decided.defaults, **fixed, **decided.fixed)
    refuse(check(settings))  # Again, since the folder may contradict a flag: a decoder, for one, allows only one head.
    refuse(ranking_problems(settings.metrics.metrics, settings.answer.num_answers, settings.generate.num_beams))
    refuse(check_trained(settings.model, settings.lora, settings.train.freeze, folder))
    notes: list[str] = []
    if resumed_dir is None:  # A resumed run has shown its notes when it first started.
        notes = [*decided.notes, *saved_note(settings.as_dict(), settings.origin)]
    return Start(settings, folder, model, moved_base, is_resumed, reasons, notes)


def _check_metrics(config: Config, own_metrics: Collection[str]) -> None:
    """Refuse unknown metrics now rather than at the first evaluation."""
    metrics = config.metrics
    metric_names(metrics.metrics, config.answer.num_answers)
    check_decisive(
        config.train.metric_for_best,
        config.data.validation_file,
        own_metrics,
        config.task.scores,
        writes_answers(metrics),
    )


def _choose_folder(config: Config, resumed_dir: Path | None) -> tuple[Path | None, bool, list[str]]:
    """The folder of the weights (None: random weights), whether it is a checkpoint of the resumed run, and messages on
    why it was chosen.
    """
    reasons: list[str] = []
    if resumed_dir is not None:
        checkpoint = Checkpoints(resumed_dir, config.train.keep_latest_n_ckp).latest()
        if checkpoint is not None:
            return checkpoint, True, []
        text = "{run} was stopped before its first checkpoint and starts again from step 1"
        reasons.append(say(text, run=resumed_dir.name))
    try:
        folder, choice_reasons = choose_start(config)
    except UserError as error:
        # Data files may be missing too: all problems are reported at once.
        raise UserError(*error.problems, *file_problems(config.data)) from None
    return folder, False, reasons + choice_reasons


@dataclass(frozen=True)
class Decided:
    """What the folder of a model decides; nothing without one.

    Args:
        fixed: settings that apply whatever the user set.
        defaults: settings that apply unless the user set them.
        notes: messages on both.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


def _decided_by(model: SavedModel, config: Config, is_new: bool) -> Decided:
    """What a model decides for a run that starts from it: shape, tokenizer, rows of added tokens, form of adapters and
    generation settings.

    Args:
        is_new: whether the run is not resumed.
    """
    shape = _shape_of(model, config)
    tokenizer_dir = config.data.tokenizer_dir
    if is_new:
        _refuse_misfits(model.base, shape)
    elif config.origin("tokenizer_dir") != "flag" and not Path(tokenizer_dir).exists():
        # The run may have moved to another machine; its checkpoint has a copy of the tokenizer.
        tokenizer_dir = AUTO
    if tokenizer_dir == AUTO:
        tokenizer_dir = str(model.tokenizer)
    fixed = {name: getattr(shape, name) for name in SHAPE_SETTINGS}
    fixed["tokenizer_dir"] = tokenizer_dir
    notes: list[str] = []
    extra_tokens = config.data.extra_tokens
    if extra_tokens is not None:
        token_settings, token_notes = _added_tokens(extra_tokens, tokenizer_dir, shape.vocab_size, config.lora)
        fixed |= token_settings
        notes += token_notes
    defaults = model.adapter_form
    if shape.gives_vectors and model.shape.gives_vectors:
        defaults |= model.settings_of(*READING_SETTINGS)
    if config.task.writes_text:
        answers, unusable = model.answer_settings(config)
        defaults |= {name: answers[name] for name in INHERITED_ANSWERS if name in answers}
        notes += [say("{problem}; the new model does not use it", problem=problem) for problem in unusable]
        notes += model.unknown_key_notes
    return Decided(fixed, defaults, notes)


def _shape_of(model: SavedModel, config: Config) -> T5ModelConfig:
    """The model's shape with the head that the settings ask for; refuses settings of another shape."""
    shape = model.shape_for(config.model, config.is_set)
    problems = [
        say(
            "{setting} = {value}, the checkpoint {base} has a different shape ({other_value}); omit it",
            setting=label(name, config.origin(name)),
            value=getattr(config.model, name),
            base=model.folder,
            other_value=getattr(shape, name),
        )
        for name in model.shape_conflicts(config.model, config.origin)
        if config.is_set(name)
    ]
    refuse(problems)
    return shape


def _refuse_to_delete_start(run_dir: Path, model: SavedModel | None, tokenizer_dir: str) -> None:
    """Refuse a new run that would delete its own start, which lies in the folder of the run that it replaces."""
    folders = [] if model is None else model.folders
    for folder in [*folders, Path(tokenizer_dir)]:
        if folder.resolve().is_relative_to(run_dir.resolve()):
            raise UserError(
                "--run_name = {run}, would replace {folder}, which this run starts from; choose another name",
                run=run_dir.name,
                folder=folder,
            )


def _refuse_misfits(base: Path, shape: T5ModelConfig) -> None:
    """Refuse weight files whose tensors do not have the shape stated in their folder; raises UserError."""
    # Adapters with added tokens have a larger vocabulary than the files of their base.
    as_stored = dataclasses.replace(shape, vocab_size=read_config(base).vocab_size)
    problems = misfits(TensorHeaders(base), as_stored)
    refuse([say("--finetune_from = {problem}", problem=problem) for problem in problems])


def _added_tokens(file: str, tokenizer_dir: str, vocab_size: int, lora: LoraConfig) -> tuple[dict[str, Any], list[str]]:
    """Settings that give the model rows for the `extra_tokens` that its tokenizer lacks, and a note on these."""
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
