"""Files and columns of the data that are not read, for a table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from data.shards.store import is_shards
from data.sources.files import listing, numbered_parts
from data.sources.folders import Listing
from data.sources.reading import head_of
from data.sources.source import Source, detect
from data.task import Table, Task
from formats import TSV
from language import join, say
from settings.declared import Config
from settings.errors import UserError
from settings.fields import counted, listed

# Of the files of a folder: a group of `Listing`, and what is said of it. {files} is how many there are.
GROUPS = {
    "descriptions": "{files} .json next to other data files, usually metadata, first {file}; give it too if it holds rows",
    "test": "{files} named as test data, first {file}",
    "others": "{files} whose names mention no split, first {file}",
    "validation": "{files} named as validation data, first {file}",
    "unheeded": "{files} named as validation or test data, because none is named train, first {file}",
}


def passed_over(config: Config, task: Task) -> Table:
    """Files and columns of the data that are not read, and how files were taken; none where that cannot be told."""
    table: Table = []
    for name in ("train_file", "validation_file"):
        spec = getattr(config.data, name)
        with suppress(UserError, OSError):
            if spec and not is_shards(spec):
                parts = [listing(part, f"--{name}") for _, part in numbered_parts(spec, f"--{name}")]
                holds_out = name == "train_file" and config.data.validation_file is None
                table += _of_files(parts, holds_out)
                table += _of_columns(config, task, [detect(part.taken[0], f"--{name}") for part in parts if part.taken])
    return list(dict.fromkeys(table))


def _of_files(parts: Sequence[Listing], holds_out: bool) -> Table:
    """What became of the files of folders whose names say something.

    Args:
        holds_out: whether those for validation are read.
    """
    taken = {file for part in parts for file in part.taken}
    titles = {"validation": "held out" if holds_out else "not read", "unheeded": "read too"}
    messages: dict[str, list[str]] = {}
    for group, message in GROUPS.items():
        files = [file for part in parts for file in getattr(part, group)]
        if group == "unheeded":
            files = [file for file in files if file in taken]
        else:
            files = [file for file in files if file not in taken]
        if files:
            count = len(files) if group == "descriptions" else counted(len(files), "file")
            title = titles.get(group, "not read")
            messages.setdefault(title, []).append(say(message, files=count, file=files[0]))
    return [(say(title), join("; ", parts_of_cell)) for title, parts_of_cell in messages.items()]


def _of_columns(config: Config, task: Task, sources: Sequence[Source]) -> Table:
    """Columns that are not used, of the first file of each part; and of TSV whether its cells are quoted."""
    columns = task.columns_of(config.data, sources)
    unused = dict[str, None]()
    for source in sources:
        names = head_of(source).all_names
        used = columns.kinds(names)
        unused |= dict.fromkeys(name for name in names if name not in used)
    table: Table = []
    if unused:
        # pandas writes its index as a column without a name.
        table.append((say("not used"), listed([name or say("a column without a name") for name in unused])))
    if columns.has_answers:
        several = "where {column} has several, the first is trained on and scores count the best"
        table.append((say("right answers"), say(several, column=columns.texts[1])))
    for source in sources:
        if source.kind == TSV and head_of(source).is_quoted:
            table.append((say("quotes"), say("{file}: cells in quotes are read as in CSV", file=source.path)))
    return table
