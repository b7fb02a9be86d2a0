"""Which model answers and how: the folder that is named, and the settings that were saved with it. One path for every
command that uses a trained model, for the API and for Python.
"""

from __future__ import annotations

from dataclasses import dataclass

from memory.answers import AnswerBatch
from model.decoding.answer_tree import AnswerTree
from model.formats.answering import GENERATION_FILE, RANKED, SEARCH_SETTINGS
from settings.consistency import ANSWER_RULES, broken, ranking_problems
from settings.declared import MOST_TOKENS, Config
from settings.errors import UserError, refuse
from settings.needs import without_effect
from settings.tasks import MODEL_HEADS
from support.language import join, say
from training.loaded_model import LoadedModel, load_model, note
from training.processes.launch import num_processes
from training.saved_model import SavedModel, find_model, saved_note
from training.setup.answer_list import answer_sources, describe, read_list

PROMPT_COLUMNS = ("prompt_column", "text_column", "history_column", "messages_column")
# Settings that only a model that writes text heeds, beside those of the group `generate`.
TEXT_SETTINGS = ("num_answers", "answers", "system_prompt")
PROMPT_SETTINGS = ("prompt_template", "source_prefix")
# Settings that only a model with an embedding head heeds; what it was trained with is the default of the last ones.
ONLY_OF_VECTORS = ("prompt_name", "truncate_dim", "query_prompt", "document_prompt")
TRAINED_WITH = ("max_seq_len", "query_prompt", "document_prompt")
READING_COMMANDS = ("embed", "search")  # These read texts with any model, whatever it answers.


@dataclass(frozen=True)
class Answering:
    """A model that is to be used.

    Args:
        config: the settings, with what the model's folder says where the user has named nothing.
        tree: of the list that its answers come from; None: from none.
    """

    config: Config
    model: SavedModel
    tree: AnswerTree | None = None

    def load(self, least: AnswerBatch | None = None, reads_files: bool = False) -> LoadedModel:
        """The model in memory; raises, and takes `least` and `reads_files`, as `load_model`."""
        return load_model(self.config, self.model, least, self.tree, reads_files)


def find_answering(config: Config, command: str) -> Answering:
    """The model that is named, and how it answers. What its folder says of answers is noted in one line.

    Args:
        command: that is given; the model has to do what it asks for.
    Raises:
        UserError: there is no such model, it asks for what cannot be done, settings are named that it cannot heed,
            several adapters are named where only one can be on, or several processes started where one works.
    """
    if command != "evaluate" and num_processes() > 1:
        raise UserError(
            "{command}, works with one process; start it by python, without accelerate launch or torchrun",
            command=command,
        )
    model = find_model(config)
    if command != "chat" and len(model.adapters) > 1:
        names = ",".join(map(str, model.adapters))
        raise UserError(
            "--adapter = {names}, only one can be on here; give one (chat changes between several)", names=names
        )
    refuse_other_head(model, command)
    head = MODEL_HEADS[model.shape.head]
    if not head.has_vectors:
        _refuse_vector_settings(config)
    if command in READING_COMMANDS or not head.writes_text:
        if command not in READING_COMMANDS:
            _refuse_text_settings(config, model.shape.head)
        # Texts are read as the model was trained, and not cut, where the user names nothing.
        saved = {"max_seq_len": MOST_TOKENS, **model.settings_of("prepare_text", "text_column")}
        if head.has_vectors:
            # What was cut in training would give another vector than it was trained for.
            saved |= model.settings_of(*TRAINED_WITH)
        return Answering(config.with_saved(saved), model)
    config = _with_answer_settings(config, model, command)
    sources = answer_sources(config.answer.answers, model)
    if not sources:
        return Answering(config, model)
    answers = read_list(config, sources, model.tokenizer)
    note(describe(answers.tree, sources))
    return Answering(config.with_changes(**answers.settings), model, answers.tree)


def _with_answer_settings(config: Config, model: SavedModel, command: str) -> Config:
    searches = command != "serve"  # Rows that come and go are written without a beam search.
    settings, problems = model.answer_settings(config, searches)
    refuse(problems)
    num_ranked = settings.pop(RANKED, 1)
    num_beams = settings.get("num_beams", config.generate.num_beams)
    if num_beams == 1:
        settings = {name: value for name, value in settings.items() if name not in SEARCH_SETTINGS}
    if command == "evaluate" and 1 < num_ranked <= num_beams:
        settings[RANKED] = num_ranked
    columns = model.settings_of(*PROMPT_COLUMNS) if command == "generate" else {}
    config = config.with_saved(settings | columns)
    refuse([say("{file}: {problem}", file=GENERATION_FILE, problem=rule) for rule in broken(ANSWER_RULES, config)])
    idle = without_effect(config, ("num_beams", "temperature")) if searches else []
    refuse([*ranking_problems(config.metrics.metrics, config.answer.num_answers, config.generate.num_beams), *idle])
    for text in [*model.unknown_key_notes, *saved_note(config.as_dict(), config.origin)]:
        note(text)
    return config


def _refuse_text_settings(config: Config, head: str) -> None:
    """Refuse what the user has named in vain, since only a model that writes text heeds it.

    A line edited in `config.py` is for all models, and no such mistake.
    """
    values = config.as_dict()
    names = [*vars(config.generate), *TEXT_SETTINGS]
    task = MODEL_HEADS[head].task
    problems = [] if task is None else without_effect(config, ("objective",), task)
    if task is None:
        names += PROMPT_SETTINGS
    for name in names:
        if config.is_on_command_line(name) and config.is_changed(name) and values[name] is not None:
            text = "--{name} = {value}, is for models that write text; omit it"
            problems.append(say(text, name=name, value=values[name]))
    refuse(problems)


def _refuse_vector_settings(config: Config) -> None:
    """Refuse what the user has named in vain, since only a model with an embedding head heeds it."""
    values = config.as_dict()
    problems = list[str]()
    for name in ONLY_OF_VECTORS:
        if config.is_on_command_line(name) and config.is_changed(name):
            text = "--{name} = {value}, is for models that were trained with --head=embedding; omit it"
            problems.append(say(text, name=name, value=values[name]))
    refuse(problems)


def refuse_other_head(model: SavedModel, command: str) -> None:
    """Refuse a model that does something else than this command asks for.

    Raises:
        UserError: which commands take it.
    """
    commands = MODEL_HEADS[model.shape.head].commands
    if command not in commands:
        raise UserError(
            "--model = {folder}, is an encoder (--head={head}), which {command} does not take; use {commands}, or give "
            "a model that writes text",
            folder=model.folder,
            head=model.shape.head,
            command=command,
            commands=join(say(" or "), commands),
        )
