"""Which model answers and how: the folder that is named, and the settings of answers that were saved with it."""

from __future__ import annotations

from collections.abc import Collection

from common.language import join, say
from model.decoding.answer_tree import AnswerTree
from model.formats.answering import GENERATION_FILE, RANKED, SEARCH
from settings.consistency import ANSWER_RULES, broken, ranking_problems
from settings.declared import Config
from settings.errors import UserError, refuse
from settings.needs import without_effect
from settings.tasks import MODEL_HEADS
from training.loaded_model import note
from training.processes.launch import num_processes
from training.saved_model import SavedModel, find_model, saved_note
from training.setup.answer_list import answer_sources, describe, read_list


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


def refuse_several_adapters(model: SavedModel) -> None:
    """Refuse a model with adapters of which one alone can be on."""
    if len(model.adapters) > 1:
        names = ",".join(map(str, model.adapters))
        raise UserError(
            "--adapter = {names}, only one can be on here; give one (chat changes between several)", names=names
        )


def find_answering(
    config: Config,
    command: str,
    columns: Collection[str] = (),
    searches: bool = True,
    several: bool = False,
    ranks: bool = False,
) -> tuple[Config, SavedModel, AnswerTree | None]:
    """The model that is named, the settings with what it says of its answers and prompts where the user has named
    nothing, and the list that its answers come from, if from one. What the model says is noted in one line.

    Args:
        command: that is given; the model has to do what it asks for.
        columns: settings of the run that trained the model which are taken over too. searches: whether there is a beam
            search here.
        several: whether there is somebody who changes between adapters. ranks: whether answers are scored by rank.
    Raises:
        UserError: there is none, it asks for what cannot be done, or several adapters, where only one can be on.
    """
    model = find_model(config)
    if not several:
        refuse_several_adapters(model)
    refuse_other_head(model, command)
    if MODEL_HEADS[model.shape.head].has_labels:
        refuse_for_labels(config, model.shape.head)
    if MODEL_HEADS[model.shape.head].writes_text:
        settings, problems = model.answer_settings(config, searches)
        refuse(problems)
        num_ranked = settings.pop(RANKED, 1)
        num_beams = settings.get("num_beams", config.generate.num_beams)
        if num_beams == 1:
            settings = {name: value for name, value in settings.items() if name not in SEARCH}
        if ranks and 1 < num_ranked <= num_beams:
            settings[RANKED] = num_ranked
        config = config.with_saved(settings | model.settings_of(*columns))
        broken_rules = broken(ANSWER_RULES, config)
        refuse([say("{file}: {problem}", file=GENERATION_FILE, problem=problem) for problem in broken_rules])
        idle = without_effect(config, ("num_beams", "temperature")) if searches else []
        ranking = ranking_problems(config.metrics.metrics, config.answer.num_answers, config.generate.num_beams)
        refuse([*ranking, *idle])
        for text in [*model.unknown_key_notes, *saved_note(config.as_dict(), config.origin)]:
            note(text)
    sources = answer_sources(config.answer.answers, model)
    writes_text = MODEL_HEADS[model.shape.head].writes_text
    if sources and not writes_text and config.given("answers"):
        raise UserError("--answers = {answers}, is for models that write text; omit it", answers=config.answer.answers)
    if not sources or not writes_text:
        return config, model, None
    answers = read_list(config, sources, model.tokenizer)
    note(describe(answers.tree, sources))
    return config.changed(**answers.settings), model, answers.tree


def refuse_for_labels(config: Config, head: str) -> None:
    """Refuse what only a model that writes text can heed.

    Raises:
        UserError: all settings that are named in vain.
    """
    values = config.as_dict()
    problems = [
        say(
            "--{name} = {value}, is for models that write text, and this one gives labels; omit it",
            name=name,
            value=values[name],
        )
        for name in (*vars(config.generate), "num_answers")
        if config.typed(name) and config.is_chosen(name)  # A line edited in `config.py` is for all models.
    ]
    refuse([*problems, *without_effect(config, ("objective",), MODEL_HEADS[head].task or "")])


def refuse_other_head(model: SavedModel, command: str) -> None:
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
