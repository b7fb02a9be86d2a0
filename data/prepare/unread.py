"""Files and columns of the data that are not read, and how files were taken, for tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from config import Config
from data.prepare.task import columns_of
from data.shards.store import is_shards
from data.sources.files import Listing, Source, detect, listing, parts_of
from data.sources.reading import head_of
from formats import TSV
from language import join, say
from settings.errors import UserError
from settings.fields import counted, listed

Rows = list[tuple[str, str]]


def passed_over(config: Config, kind: str) -> Rows:
    """Files and columns of the data that are not read, and how files were taken, for a table; none where that cannot be told."""
    table: Rows = []
    for name in ("train_file", "validation_file"):
        spec = getattr(config.data, name)
        with suppress(UserError, OSError):
            if spec and not is_shards(spec):
                parts = [listing(part, f"--{name}") for part in parts_of(spec)]
                holds_out = name == "train_file" and config.data.validation_file is None
                table += _of_files(parts, holds_out)
                firsts = [detect(part.taken[0], f"--{name}") for part in parts if part.taken]
                table += _of_columns(config, kind, firsts)
    return list(dict.fromkeys(table))


def _of_files(parts: Sequence[Listing], holds_out: bool) -> Rows:
    """What became of the files of folders whose names say something.

    Args:
        holds_out: whether those for validation are read.
    """
    taken, told_files = {file for part in parts for file in part.taken}, dict[str, list[str]]()
    for title, group, words in (
        ("not read", "descriptions", "{files} .json beside other data files, where it mostly describes them, the first {file}; name it too if it holds rows"),
        ("not read", "test", "{files} for testing by name, the first {file}"),
        ("not read", "others", "{files} whose names say no split, the first {file}"),
        ("held out" if holds_out else "not read", "validation", "{files} for validation by name, the first {file}"),
        ("read too", "unheeded", "{files} that say validation or test by name, as none says train, the first {file}"),
    ):  # fmt: skip
        found = [file for part in parts for file in getattr(part, group) if (file in taken) == (title == "read too")]
        if found:
            files = len(found) if group == "descriptions" else counted(len(found), "file")
            told_files.setdefault(title, []).append(say(words, files=files, file=found[0]))
    return [(say(title), join("; ", said)) for title, said in told_files.items()]


def _of_columns(config: Config, kind: str, firsts: Sequence[Source]) -> Rows:
    """Columns that are not used, of the first file of each part; and of TSV whether its cells are quoted."""
    columns, unused = columns_of(config.data, kind, firsts), dict[str, None]()
    for source in firsts:
        names = head_of(source).all_names
        unused |= dict.fromkeys(name for name in names if name not in columns.kinds(names))
    named = [name or say("a column without a name") for name in unused]  # as pandas writes its index
    table = [(say("not used"), listed(named))] if named else []
    quoted = [source.path for source in firsts if source.kind == TSV and head_of(source).is_quoted]
    told_quotes = "{file}: cells in quotes are read as in CSV"
    return [*table, *((say("quotes"), say(told_quotes, file=file)) for file in quoted)]
