"""The data of a run where the user left something `auto`: what they teach, their files and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.shards.store import Manifest, is_shards
from data.sources.columns import Columns
from data.sources.files import find, held_out, numbered_parts, parts_of, set_names
from data.sources.formats import JSONL
from data.sources.places import public
from data.sources.reading import what_it_teaches
from data.sources.source import Source
from data.task import TaskProtocol, task_reading
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import Config, DataConfig
from settings.errors import UserError, collected, refuse
from settings.fields import AUTO
from settings.needs import without_effect
from settings.tasks import default_objective, task_named
from support.language import say
from support.storage import Once, make_once


@dataclass(frozen=True)
class TrainingData:
    """The data to train on.

    Args:
        objective: a key of `settings.tasks.TASKS`.
        sources, columns: the rows; none where shards are given.
        shards: a shards folder, or one split of it.
        parts: what the user named, separated by commas; `Source.part` counts these.
    """

    objective: str
    sources: list[Source]
    columns: Columns
    shards: Path | None = None
    parts: Sequence[str] = ("",)

    @property
    def task(self) -> TaskProtocol:
        """The task of the objective."""
        task: TaskProtocol = task_named(self.objective)
        return task


def find_training_data(
    data: DataConfig, is_finetune: bool, once: Once = make_once, setting: str = "train_file"
) -> TrainingData:
    """Decide the objective and find the training data; the built-in sample if no file is named.

    Args:
        is_finetune: whether a trained model is finetuned, which decides the objective before the columns do.
        once: `make_once`, or `only_if_made` where nothing shall be made. setting: which names the file.
    Raises:
        UserError: a file is missing, empty or broken. NotMade: by `only_if_made`.
    """
    file = getattr(data, setting)
    objective = data.objective
    if objective == AUTO and (is_finetune or file is None):
        objective = default_objective(is_finetune)
    if file is None:
        path, columns = task_named(objective).sample(data.cache_dir, once)
        return TrainingData(objective, [Source(path, JSONL)], columns)
    if is_shards(file):
        return _given_shards(data, objective, file)
    sources = find(file, f"--{setting}")
    if objective == AUTO:
        objective = default_objective(is_finetune=False)
        contents, _ = what_it_teaches(data, sources[0])
        if contents is not None:
            task = task_reading(contents)
            refuse(task.problems_unless_named(data, file))
            objective = task.name
    columns = task_named(objective).columns_of(data, sources)
    return TrainingData(objective, sources, columns, parts=[public(part) for part in parts_of(file)])


def _given_shards(data: DataConfig, objective: str, file: str) -> TrainingData:
    reader = Manifest.of(Path(file)).task
    if objective == AUTO:
        refuse(reader.problems_unless_named(data, file))
        objective = reader.name
    if task_named(objective).shards != reader.shards:
        problem = say(
            "--train_file = {path}, holds {kind} shards, which {objective} does not read; prepare the text again",
            path=file,
            kind=reader.shards.kind,
            objective=objective,
        )
        refuse(reader.problems_unless_named(data, file) or [problem])
    return TrainingData(objective, [], Columns(), Path(file))


def held_out_sources(data: DataConfig) -> list[Source]:
    """The files to validate with: those named, or those of the training folders whose names say so; none: rows are held
    out.

    Raises:
        UserError: a file is missing, empty or broken.
    """
    flag = "--validation_file"
    if data.validation_file is None:
        return [] if data.train_file is None or is_shards(data.train_file) else held_out(data.train_file)
    if is_shards(data.validation_file):
        return []
    for _, part in numbered_parts(data.validation_file, flag):
        if is_shards(part) and set_names(data.validation_file):
            raise UserError(
                "{flag} = {validation_file}, {prepared} is shards; sets with names are made of files of rows",
                flag=flag,
                validation_file=data.validation_file,
                prepared=part,
            )
    return find(data.validation_file, flag)


def named_files(data: DataConfig) -> dict[str, str]:
    """The files of rows that the settings name, by their flags; shards are none."""
    files = {"--train_file": data.train_file, "--validation_file": data.validation_file}
    return {flag: spec for flag, spec in files.items() if spec and not is_shards(spec)}


def check_tokenizer(data: DataConfig) -> None:
    """Read the tokenizer that the settings name, if they name one; raises UserError."""
    if data.tokenizer_dir != AUTO:
        Tokenizer.load(data.tokenizer_dir)


def file_problems(data: DataConfig) -> list[str]:
    """Find what is wrong with the data and the tokenizer that the settings name, before any row is read, for
    `UserError`.
    """
    problems = list[str]()
    for flag, spec in named_files(data).items():
        with collected(problems):
            find(spec, flag)
    with collected(problems):
        check_tokenizer(data)
    return problems


def refuse_ineffective(config: Config, training_data: TrainingData, raw_validation: Sequence[Source] = ()) -> None:
    """Refuse settings that have no effect on these rows.

    Args:
        raw_validation: files of rows to validate with, which cleaning is for where the training data are shards.
    Raises:
        UserError: all problems at once.
    """
    data = config.data
    problems: list[str] = [*without_effect(config, ("objective",), training_data.objective)]
    for name in training_data.task.ineffective_settings(data, training_data):
        value = getattr(data, name)
        problems.append(say("--{name} = {value}, has no effect on these rows; omit it", name=name, value=value))
    if training_data.shards is not None:
        if data.max_samples is not None:
            words = "--max_samples = {max_samples}, shards are used whole; prepare the text with --max_samples"
            problems.append(say(words, max_samples=data.max_samples))
        cleaning = {"clean": config.cleaning.clean, "dedup": config.cleaning.dedup != "none"}
        for name, is_on in cleaning.items():
            if is_on and not raw_validation and config.origin(name) == "flag":
                words = "--{name}, shards are used as they are; prepare the text with --{name}"
                problems.append(say(words, name=name))
    refuse(problems)
