"""Which folder the weights of a new run are from: the one that is named, or a finished run.

A folder that the user names is taken. Else the newest finished run is, where nothing speaks against it, and what it is
and which other starts there are is told: finetuning takes a pretraining run of the shape that is asked for, whose
tokenizer suits the data (`data.prepare.estimate`), or random weights; preferences a finetuned model that writes text,
or else a pretrained one.
"""

from __future__ import annotations

from pathlib import Path

from data.prepare.estimate import misfit
from data.prepare.looking import look
from model.formats.sentence_transformers import encoder_folder
from model.formats.shape_file import CONFIG_FILE, read_config
from model.shapes import weight_counts
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO, near_path
from settings.program import program
from settings.tasks import MODEL_HEADS
from support.language import say
from training.checkpoints.runs import ADAPTER_FILES, SavedRun, runs_newest_first
from training.saved_model import SavedModel
from training.setup.hub import fetch_model


def choose_start(config: Config) -> tuple[Path | None, list[str]]:
    """Choose the folder whose weights a run starts from at its first step.

    Returns:
        the folder, None for random weights; and what is to be told of a choice that the user did not make.
    Raises:
        UserError: what was named is not there, or preferences have nothing to start from.
    """
    setting = config.train.finetune_from
    if setting not in (AUTO, None):
        return _named_start(str(setting), config.train.allow_download), []
    needs_base = config.task.needs_base
    if not needs_base and not config.train.is_finetune:
        return None, []
    output_dir = config.run.output_dir
    reasons: list[str] = []
    if needs_base or setting == AUTO:
        for run in _candidates(config):
            reason = _obstacle_of_run(run, config)
            if reason is None:
                return run.folder.absolute(), [_start_note(run.folder, needs_base)]
            reasons.append(reason)
        reasons.append(say("there is no finished pretraining run in {folder}", folder=output_dir))
    else:
        reasons.append(say("because of --finetune_from=none"))
    if not needs_base:
        tokenizer = config.data.tokenizer_dir
        text = (
            "starting from random weights, {why}: the model ({preset}) learns from this data alone, with "
            "{tokenizer}; a few thousand pairs are not enough for that. {others}"
        )
        note = say(
            text,
            why=reasons[0],
            preset=config.model_preset,
            others=_other_starts(),
            tokenizer=say("a tokenizer trained on it") if tokenizer == AUTO else tokenizer,
        )
        return None, [note]
    raise UserError(
        "--finetune_from = {finetune_from}, there is no finished run in {folder}{hint}, and preferences need "
        "a model to continue from; give a model folder, or finetune first",
        finetune_from=setting,
        folder=output_dir,
        hint=say(" ({reason})", reason=reasons[0]) if len(reasons) > 1 else "",
    )


def _candidates(config: Config) -> list[SavedRun]:
    """The runs that a run may start from without being told to, the first choice in front."""
    runs = [run for run in runs_newest_first(config.run.output_dir) if run.model_folder is not None]
    if not config.task.needs_base:
        return [run for run in runs if run.is_of_text]
    return sorted((run for run in runs if run.kind != "dpo"), key=lambda run: run.kind == "pretrain")


def _obstacle_of_run(run: SavedRun, config: Config) -> str | None:
    """Why a run is not started from unless it is named; None: nothing speaks against it."""
    if not run.is_finished:
        return say("{run} is not finished and is used only if named explicitly", run=str(run.model_folder))
    saved = SavedModel.read(run.folder)
    name = str(run.folder)
    if config.task.needs_base:
        if not MODEL_HEADS[saved.shape.head].writes_text:
            return say("{model} predicts labels and writes no text", model=name)
        return None
    conflicts = saved.shape_conflicts(config.model, config.origin)
    if conflicts:
        is_of_preset = config.overrides_saved_model("model_preset") and config.origin(conflicts[0]) == "preset"
        setting = "model_preset" if is_of_preset else conflicts[0]
        text = "{model} does not match --{name}={value}"
        return say(text, model=name, name=setting, value=config.as_dict()[setting])
    problem = look(config, misfit, config.data, config.train.is_finetune, run.folder, always_in_child=True)
    if problem:
        return say("{model} is not used unless named explicitly: {problem}", model=name, problem=problem)
    return None


def _other_starts() -> str:
    return say("other starting points: --finetune_from=FOLDER (docs/finetuning.md lists checkpoints)")


def _start_note(folder: Path, is_reference: bool) -> str:
    if is_reference:
        text = "starting from {model}, the newest finished run, which is also the reference model; {others}"
        return say(text, model=str(folder), others=_other_starts())
    shape = read_config(folder)
    saw_sample = SavedModel.read(folder).run_settings.get("train_file", "") is None
    return say(
        "starting from {model}, the newest finished pretraining run ({weights} parameters, {tokens} tokens), with "
        "its architecture and tokenizer{sample}; {others}, or --finetune_from=none for random weights",
        model=str(folder),
        weights=f"{weight_counts(shape)['total']:,}",
        tokens=f"{shape.vocab_size:,}",
        sample=say("; it was trained on the built-in sample only") if saw_sample else "",
        others=_other_starts(),
    )


def _named_start(name: str, allow_download: bool) -> Path:
    folder = Path(name)
    if _holds_model(folder):
        return folder
    if not folder.is_dir():
        fetched = fetch_model(name, allow_download, _holds_model)
        if fetched is not None:
            return fetched
    raise UserError(
        "--finetune_from = {folder}, {what}; give a folder with config.json, model.safetensors and tokenizer.json or "
        "spiece.model, such as `hf download google/flan-t5-small --local-dir models/flan-t5-small` fetches",
        folder=folder,
        what=_obstacle(folder),
    )


def _obstacle(folder: Path) -> str:
    """Why a folder is no model to start from."""
    if not folder.exists():
        return say("no such folder{near}", near=near_path(folder))
    if folder.is_file():
        return say("is a file")
    hint: str = ""
    if any(folder.glob("pytorch_model*.bin")):
        command = f"{program()} convert --model={folder} --output={folder}-plain --allow_pickle=True"
        hint = say("; turn its pytorch_model.bin into it: {command}", command=command)
    return say("holds no {file}{hint}", file=CONFIG_FILE, hint=hint)


def _holds_model(folder: Path) -> bool:
    return (encoder_folder(folder) / CONFIG_FILE).is_file() or (folder / ADAPTER_FILES[0]).is_file()
