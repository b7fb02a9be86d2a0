"""The data of a run where the user left something `auto`: what they teach, their files and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.shards.store import Manifest, is_shards
from data.sources.columns import Columns
from data.sources.files import collected, find, held_out, numbered_parts, parts_of, set_names
from data.sources.places import public
from data.sources.reading import what_it_teaches
from data.sources.source import Source
from data.task import Task, task_reading
from data.tokenizers.tokenizer import Tokenizer
from formats import JSONL
from language import say
from settings.declared import Config, DataConfig
from settings.errors import UserError, refuse
from settings.fields import AUTO
from settings.needs import without_effect
from settings.tasks import default_objective, task_named
from storage import Once, make_once


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
    def task(self) -> Task:
        """The task of the objective."""
        task: Task = task_named(self.objective)
        return task


def find_training_data(config: Config, once: Once = make_once, flag: str = "--train_file") -> TrainingData:
    """Decide the objective and find the training data; the built-in sample if no file is named.

    Args:
        once: `make_once`, or `only_if_made` where nothing shall be made. flag: by which the file was named.
    Raises:
        UserError: a file is missing, empty or broken. NotMade: by `only_if_made`.
    """
    data = config.data
    objective = data.objective
    if objective == AUTO and (config.train.is_finetune or data.train_file is None):
        objective = default_objective(config.train.is_finetune)
    if data.train_file is None:
        path, columns = task_named(objective).sample(data.cache_dir, once)
        return TrainingData(objective, [Source(path, JSONL)], columns)
    if is_shards(data.train_file):
        return _given_shards(data, objective)
    sources = find(data.train_file, flag)
    if objective == AUTO:
        objective = _objective_of(data, sources[0])
    columns = task_named(objective).columns_of(data, sources)
    return TrainingData(objective, sources, columns, parts=[public(part) for part in parts_of(data.train_file)])


def _objective_of(data: DataConfig, source: Source) -> str:
    """What a file teaches by its columns."""
    contents, _ = what_it_teaches(data, source)
    if contents is None:
        return default_objective(is_finetune=False)
    task = task_reading(contents)
    if problem := task.unless_named(data):
        raise UserError(problem)
    return task.name


def _given_shards(data: DataConfig, objective: str) -> TrainingData:
    path = Path(str(data.train_file))
    reader = Manifest.of(path).task
    is_read = objective != AUTO and task_named(objective).shards == reader.shards
    if not is_read and (problem := reader.unless_named(data)):
        raise UserError(problem)
    if objective == AUTO:
        return TrainingData(reader.name, [], Columns(), path)
    if not is_read:
        raise UserError(
            "--train_file = {path}, holds {kind} shards, which {objective} does not read; prepare the text again",
            path=path,
            kind=reader.shards.kind,
            objective=objective,
        )
    return TrainingData(objective, [], Columns(), path)


def held_out_sources(data: DataConfig) -> list[Source]:
    """The files to validate with: those named, or those of the training folders whose names say so; none: rows are held out.

    Raises:
        UserError: a file is missing, empty or broken.
    """
    flag = "--validation_file"
    if data.validation_file is not None:
        names = set_names(data.validation_file)
        if is_shards(data.validation_file):
            return []
        if names and (prepared := [part for _, part in numbered_parts(data.validation_file, flag) if is_shards(part)]):
            raise UserError(
                "{flag} = {validation_file}, {prepared} is shards; sets with names are made of files of rows",
                flag=flag,
                validation_file=data.validation_file,
                prepared=prepared[0],
            )
        return find(data.validation_file, flag)
    return [] if data.train_file is None or is_shards(data.train_file) else held_out(data.train_file)


def file_problems(data: DataConfig) -> list[str]:
    """Find what is wrong with the data and the tokenizer that the settings name, before any row is read, for `UserError`."""
    problems = list[str]()
    for name in ("train_file", "validation_file"):
        with collected(problems):
            if (spec := getattr(data, name)) and not is_shards(spec):
                find(spec, f"--{name}")
    with collected(problems):
        if data.tokenizer_dir != AUTO:
            Tokenizer.load(data.tokenizer_dir)
    return problems


def check_heeded(config: Config, training_data: TrainingData) -> None:
    """Refuse settings that have no effect on these rows; raises UserError."""
    # An edited line is a default for all data: rows of another kind stand over it, as a file does.
    origins = (*config.origins, ("objective", "file"))
    decided = replace(config.changed(objective=training_data.objective), origins=origins)
    problems = without_effect(decided, ("objective",))
    for name in training_data.task.idle_settings(config.data, training_data):
        value = getattr(config.data, name)
        problems.append(say("--{name} = {value}, has no effect on these rows; omit it", name=name, value=value))
    refuse(problems)
