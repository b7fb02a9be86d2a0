"""Which folder the weights of a new run are from: the one that is named, or a finished run.

A folder that the user names is taken. What is found instead is told first: what it is, why it, and what other starts
there are. A finished pretraining run is taken where its shape is not another than the one asked for and its tokenizer
suits the data (`data.prepare.estimate`); else weights are random.
"""

from __future__ import annotations

from pathlib import Path

from common.language import say
from data.prepare.estimate import misfit
from data.prepare.looking import look
from model.formats.shape_file import CONFIG_FILE, read_config
from model.shapes import weight_counts
from settings.declared import Config, DataConfig
from settings.errors import UserError
from settings.fields import AUTO, near_path
from settings.program import program
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
    named = config.train.finetune_from
    if named not in (AUTO, None):
        return _named_start(str(named), config.train.allow_download), []
    runs = runs_newest_first(config.run.output_dir)
    if config.task.needs_base:
        return _start_of_preferences(named, runs, config.run.output_dir)
    if not config.train.is_finetune:
        return None, []
    if named is None:
        return None, [_random_note(say("because of --finetune_from=none"), config.model_preset, config.data)]
    reasons: list[str] = []
    for run in runs:
        if not run.is_of_text or run.model_folder is None:
            continue
        if not run.is_finished:
            text = "{run} is not finished and is used only if named explicitly"
            reasons.append(say(text, run=str(run.model_folder)))
            continue
        conflicts = SavedModel.read(run.folder).shape_conflicts(config.model, config.origin)
        if conflicts:
            is_of_preset = config.named("model_preset") and config.origin(conflicts[0]) == "preset"
            name = "model_preset" if is_of_preset else conflicts[0]
            text = "{model} does not match --{name}={value}"
            reasons.append(say(text, model=str(run.folder), name=name, value=config.as_dict()[name]))
        else:
            problem = look(config, misfit, config.data, config.train.is_finetune, run.folder, always_in_child=True)
            if not problem:
                return run.folder.absolute(), [_start_note(run.folder)]
            text = "{model} is not used unless named explicitly: {problem}"
            reasons.append(say(text, model=str(run.folder), problem=problem))
    reasons.append(say("there is no finished pretraining run in {folder}", folder=config.run.output_dir))
    return None, [_random_note(reasons[0], config.model_preset, config.data)]


def _other_starts() -> str:
    return say("other starting points: --finetune_from=FOLDER (docs/finetuning.md lists checkpoints)")


def _start_note(folder: Path) -> str:
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


def _random_note(reason: str, model_preset: str, data: DataConfig) -> str:
    tokenizer = data.tokenizer_dir
    return say(
        "starting from random weights, {why}: the model ({preset}) learns from this data only, with {tokenizer}; "
        "a few thousand pairs are not enough for that. {others}",
        why=reason,
        preset=model_preset,
        others=_other_starts(),
        tokenizer=say("a tokenizer trained on it") if tokenizer == AUTO else tokenizer,
    )


def _named_start(named: str, allow_download: bool) -> Path:
    folder = Path(named)
    if _holds_model(folder):
        return folder
    if not folder.is_dir():
        fetched = fetch_model(named, allow_download, _holds_model)
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
    return any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_FILES[0]))


def _start_of_preferences(named: str | None, runs: list[SavedRun], output_dir: str) -> tuple[Path, list[str]]:
    """The newest finetuned run, else the newest pretrained one."""
    finished = [run for kind in ("finetune", "pretrain") for run in runs if run.is_finished and run.kind == kind]
    if finished:
        folder = finished[0].folder
        text = "starting from {model}, the newest finished run, which is also the reference model; {others}"
        return folder.absolute(), [say(text, model=str(folder), others=_other_starts())]
    hint: str = ""
    unfinished = next(filter(None, (run.model_folder for run in runs)), None)
    if unfinished is not None:
        text = " ({model_folder} is not finished, and is taken only if it is named)"
        hint = say(text, model_folder=unfinished)
    raise UserError(
        "--finetune_from = {finetune_from}, there is no finished run in {folder}{hint}, and preferences need "
        "a model to continue from; give a model folder, or finetune first",
        finetune_from=named,
        folder=output_dir,
        hint=hint,
    )
