"""Which model answers and how: the folder that is named, and the settings of answers that were saved with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from language import join, say
from model.formats.answering import DRAWN, GENERATION_FILE, RANKED, SEARCH, answers_by, remarks
from settings.consistency import ANSWER_RULES, broken, ranking_problems
from settings.declared import Config
from settings.errors import UserError, refuse
from settings.fields import AUTO, near_path
from settings.needs import without_effect
from settings.tasks import MODEL_HEADS
from training.checkpoints.runs import model_folder, runs_newest_first
from training.processes.launch import num_processes, rank
from training.report.progress import Progress
from training.setup.model_folders import ModelFolders, base_of


def note(text: str) -> None:
    """Say something beside the answers, which a script may read from standard output."""
    Progress(1, rank() == 0, stream=sys.stderr).note(text)


def answering(config: Config, model: ModelFolders, searches: bool = True, ranks: bool = False) -> Config:
    """Config with the settings of answers saved in the model's folder, unless flags override them; says which.

    Args:
        model: what its adapter says goes before. searches: whether there is a beam search here. ranks: whether answers are
            scored by rank.
    Raises:
        UserError: the folder asks for what cannot be done.
    """
    settings = config.generate
    given = {name for name in vars(settings) if config.given(name)}
    if settings.num_beams > 1 or ("temperature" in given and settings.temperature == 0.0):
        given.update(DRAWN)
    if settings.temperature > 0.0 or not searches:
        given.update(SEARCH)
    if config.answer.num_answers > 1:
        given.add("split_prompts")  # It joins one answer of each part.
    saved = dict[str, Any]()
    problems = list[str]()
    for folder in dict.fromkeys((model.base, model.learnt)):
        published, wrong = answers_by(folder, given)
        saved |= published
        problems += wrong
        for keys in remarks(folder):
            note(say("{keys}: unknown, ignored", keys=keys))
    refuse(problems)
    num_ranked = saved.pop(RANKED, 1)
    num_beams = saved.get("num_beams", settings.num_beams)
    if num_beams == 1:
        saved = {name: value for name, value in saved.items() if name not in SEARCH}
    saved = {name: value for name, value in saved.items() if value != getattr(settings, name)}
    if ranks and not config.given(RANKED) and 1 < num_ranked <= num_beams:
        saved[RANKED] = num_ranked
    config = config.changed(**saved)
    refuse(
        [say("{file}: {problem}", file=GENERATION_FILE, problem=problem) for problem in broken(ANSWER_RULES, config)]
    )
    idle = without_effect(config, ("num_beams", "temperature")) if searches else []
    refuse([*ranking_problems(config), *idle])
    if saved:
        flags = ", ".join(f"--{name}={value}" for name, value in saved.items())
        text = "generating with {settings} from the model's {file}; flags override it"
        note(say(text, settings=flags, file=GENERATION_FILE))
    return config


def with_saved(config: Config, model: ModelFolders, *names: str) -> Config:
    """Config with these settings of the run that trained the model, unless a flag or a file says otherwise.

    Raises:
        UserError: the file of that run has a value that the setting cannot have.
    """
    saved = model.run_settings
    return config.changed(**{name: saved[name] for name in names if name in saved and not config.given(name)})


def find_model(config: Config) -> ModelFolders:
    """The model that `--model` names, with its adapters; auto: the base of the adapter that is named, else the newest run's model.

    Raises:
        UserError: it is not there.
    """
    named = config.checkpoint.model
    adapter = config.checkpoint.adapter
    if named == AUTO and adapter is not None:
        return ModelFolders.of(base_of(ModelFolders.of(Path(), adapter).learnt), adapter)
    if named == AUTO:
        folders = (run.folder for run in runs_newest_first(config.run.output_dir) if run.model_folder is not None)
        newest = next(folders, None)
        if newest is None:
            raise UserError(
                "--model = auto, there is no trained model in {output_dir}; give a folder, or train first",
                output_dir=config.run.output_dir,
            )
        named = str(newest)
    folder = model_folder(named) or Path(named)
    if folder.is_file():
        raise UserError(
            "--model = {folder}, is a file; give the folder with config.json, model.safetensors and tokenizer.json",
            folder=named,
        )
    if not folder.is_dir():
        missing = say(
            "--model = {folder}, no such folder; give one with config.json, model.safetensors and tokenizer.json",
            folder=named,
        )
        raise UserError(missing + near_path(folder))
    return ModelFolders.of(folder, adapter)


def check_one_process(command: str) -> None:
    """Refuse to do the same work several times over.

    Raises:
        UserError: a launcher has started several processes.
    """
    if num_processes() > 1:
        raise UserError(
            "{command}, works with one process; start it by python, without accelerate launch or torchrun",
            command=command,
        )


def refuse_several_adapters(model: ModelFolders) -> None:
    """Refuse a model with adapters of which one alone can be on."""
    if len(model.adapters) > 1:
        names = ",".join(map(str, model.adapters))
        raise UserError(
            "--adapter = {names}, only one can be on here; give one (chat changes between several)", names=names
        )


def find_answering(
    config: Config, searches: bool = True, several: bool = False, ranks: bool = False
) -> tuple[Config, ModelFolders]:
    """Config with what the model that is named says of how it answers, and the model.

    Args:
        searches: whether there is a beam search here. several: whether there is somebody who changes between adapters.
        ranks: whether answers are scored by rank.
    Raises:
        UserError: there is none, it asks for what cannot be done, or several adapters, where only one can be on.
    """
    model = find_model(config)
    if not several:
        refuse_several_adapters(model)
    if MODEL_HEADS[model.shape.head].writes_text:
        return answering(config, model, searches, ranks), model
    return config, model


def refuse_other_head(model: ModelFolders, command: str) -> None:
    """Refuse a model that does something else than this command asks for.

    Raises:
        UserError: which commands take it.
    """
    commands = MODEL_HEADS[model.shape.head].commands
    if command not in commands:
        raise UserError(
            "--model = {folder}, is an encoder (--head={head}), which {command} does not take; use {others}, or give a "
            "model that writes text",
            folder=model.folder,
            head=model.shape.head,
            command=command,
            others=join(say(" or "), commands),
        )
