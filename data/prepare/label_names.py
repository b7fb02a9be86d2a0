"""The names of labels, as the data have them: read once, and kept under `cache_dir`."""

from __future__ import annotations

import json
from itertools import chain, islice
from pathlib import Path

from data.prepare.training_data import TrainingData
from data.progress import ProgressLine
from data.shards.store import Manifest
from data.sources.files import sources_fingerprint
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from data.text.labels import MOST_LABELS, in_order, is_fraction
from settings.declared import DataConfig, T5ModelConfig
from settings.errors import UserError
from settings.fields import AUTO, counted, listed
from support.language import say
from support.storage import Once, fingerprint, read_once_made, read_text, write_text

FILE_NAME = "labels.json"


def label_names(data: DataConfig, model: T5ModelConfig, training_data: TrainingData, once: Once) -> tuple[str, ...]:
    """The names of the labels that a head learns, in their order; () where they are numbers to be predicted.

    Raises:
        UserError: the data cannot be read, or its labels are not names. NotMade: by `only_if_made`.
    """
    if model.labels != AUTO:
        return model.label_names
    if training_data.shards is not None:
        return Manifest.of(training_data.shards).label_names
    facts = {
        "sources": sources_fingerprint(training_data.sources),
        "columns": training_data.columns.sides(),
        "head": training_data.objective,
        "max_samples": data.max_samples,
        "skip": data.skip_bad_rows,
    }
    folder = Path(data.cache_dir) / f"labels-{fingerprint(facts)}"

    def write(partial: Path) -> None:
        names = _names_in(training_data, data.max_samples, data.skip_bad_rows)
        partial.mkdir()
        write_text(partial / FILE_NAME, json.dumps(names, ensure_ascii=False) + "\n")

    return read_once_made(folder, write, _cached_names, once)


def _cached_names(folder: Path) -> tuple[str, ...]:
    names = json.loads(read_text(folder / FILE_NAME))
    if not isinstance(names, list) or len(names) == 1 or not all(isinstance(name, str) for name in names):
        raise ValueError("no names of labels")
    return tuple(names)


def _names_in(training_data: TrainingData, max_samples: int | None, skip_bad_rows: bool) -> list[str]:
    bad_rows = BadRows(skip_bad_rows)
    column = training_data.columns.sides()[1]
    names = set[str]()
    rows = chain.from_iterable(read_rows(training_data.sources, training_data.columns, bad_rows))
    with ProgressLine(say("reading labels")) as progress:
        for text, labels in islice(rows, max_samples):
            progress.add(1, len(text))
            names.update(label for label in json.loads(labels) if label is not None)
            if len(names) > MOST_LABELS:
                raise UserError(
                    "--labels = auto, column {label} has more than {most:,} labels, such as {found}; use "
                    "--labels=regression for numbers",
                    label=column,
                    most=MOST_LABELS,
                    found=listed(sorted(names), 3),
                )
    ordered = in_order(list(names))
    for name in ordered:
        if is_fraction(name):
            raise UserError(
                "--labels = auto, column {label} has numbers such as {found}; use --labels=regression, or name the "
                "classes",
                label=column,
                found=name,
            )
        if "," in name:
            raise UserError(
                "--label_column = {label}, has the label {commas!r}; commas separate labels here: write it without",
                label=column,
                commas=name,
            )
    if len(names) < 2:
        problem = say(
            "--label_column = {label}, has {labels}; a head needs two or more, or --labels=regression",
            label=column,
            labels=counted(len(names), "label"),
        )
        raise UserError(bad_rows.explain(problem))
    return ordered
