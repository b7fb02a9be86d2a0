"""Files and columns of the data that are not read, for a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

from data.prepare.training_data import named_files
from data.sources.files import listing, numbered_parts
from data.sources.folders import Listing
from data.sources.formats import TSV
from data.sources.reading import head_of
from data.sources.source import Source, detect
from data.task import Table, TaskProtocol
from settings.declared import DataConfig
from settings.errors import UserError
from settings.fields import counted, listed
from support.language import join, say

# For each group of `Listing` what is said of its files; {files} and {count} are how many there are.
GROUPS = {
    "descriptions": (
        "{count} .json next to other data files, usually metadata, first {file}; name it too if it holds rows"
    ),
    "test": "{files} named as test data, first {file}",
    "unsorted": "{files} whose names contain neither train, validation nor test, first {file}",
    "validation": "{files} named as validation data, first {file}",
    "unheeded": "{files} named as validation or test data, because none is named train, first {file}",
}


def passed_over(data: DataConfig, task: TaskProtocol) -> Table:
    """Files and columns of the data that are not read, and how files were taken; none where that cannot be told."""
    table: Table = []
    for flag, spec in named_files(data).items():
        with suppress(UserError, OSError):
            parts = [listing(part, flag) for _, part in numbered_parts(spec, flag)]
            table += _of_files(parts, flag == "--train_file" and data.validation_file is None)
            table += _of_columns(data, task, [detect(part.files[0], flag) for part in parts if part.files])
    return list(dict.fromkeys(table))


def _of_files(parts: Sequence[Listing], holds_out: bool) -> Table:
    """What became of the files of folders whose names say something.

    Args:
        holds_out: whether those for validation are read.
    """
    read = set(chain.from_iterable(part.files for part in parts))
    titles = {"unheeded": "also read", "validation": "held out" if holds_out else "not read"}
    messages = defaultdict[str, list[str]](list)
    for group, message in GROUPS.items():
        of_group = chain.from_iterable(getattr(part, group) for part in parts)
        files = [file for file in of_group if (file in read) == (group == "unheeded")]
        if files:
            cell = say(message, files=counted(len(files), "file"), count=len(files), file=files[0])
            messages[titles.get(group, "not read")].append(cell)
    return [(say(title), join("; ", cells)) for title, cells in messages.items()]


def _of_columns(data: DataConfig, task: TaskProtocol, sources: Sequence[Source]) -> Table:
    """Columns that are not used, of the first file of each part; and of TSV whether its cells are quoted."""
    columns = task.columns_of(data, sources)
    table: Table = []
    unused: dict[str, None] = {}
    quoted: Table = []
    for source in sources:
        head = head_of(source)
        used = columns.kinds(head.all_names)
        # pandas writes its index as a column without a name.
        unused |= dict.fromkeys(name or say("a column without a name") for name in head.all_names if name not in used)
        if source.kind == TSV and head.is_quoted:
            quoted.append((say("quotes"), say("{file}: cells in quotes are read as in CSV", file=source.path)))
    if unused:
        table.append((say("not used"), listed(list(unused))))
    if columns.has_answers:
        several = "if {column} has several answers, training uses the first, and scores use the one that matches best"
        table.append((say("right answers"), say(several, column=columns.texts[1])))
    return table + quoted
