"""The files that the user means, and whether they have changed.

A source is one file, here or at an address: plain text, JSONL, CSV, TSV or FASTA (each plain or compressed with gzip,
bzip2, xz or zstandard), Parquet, or Arrow IPC as file or as stream (Hugging Face's `.arrow`). A folder that Hugging
Face `datasets` saved gives the files that it lists, a saved dictionary of splits the split that is wanted. `reading`
turns sources into rows.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

from data.sources.folders import KINDS_OF_FOLDERS, Listing, list_folder
from data.sources.formats import TSV
from data.sources.places import Place, is_glob, list_remote, local_path, public
from data.sources.source import Source, detect
from settings.errors import UserError, collected, reason_of, refuse
from settings.fields import near_path
from support.language import join, say
from support.storage import fingerprint

_NAMED_SET = re.compile(r"([\w.-]+)=(.+)")  # a validation set with its name
_HUB_SPLIT = re.compile(r"(hf://[^:?]+):([\w-]+)")  # a split of a data set


def find(spec: str, name: str = "--train_file") -> list[Source]:
    """Find the files that a user means.

    Args:
        spec: a file, a folder (the data files below it, in the order of their names, as `listing` sorts them), a glob,
            an
        address of these, or several separated by commas; of `--validation_file` also sets by name. name: what messages
        call it.
    Returns:
        one or more sources, without repetition.
    Raises:
        UserError: all problems at once.
    """
    problems: list[str] = []
    files: list[tuple[int, Place]] = []
    for number, part in numbered_parts(spec, name):
        with collected(problems):
            files += [(number, file) for file in _files_of(part, name)]
    sources = _detected(files, name, problems)
    if not sources:
        raise UserError("{name} = {spec}, names no file; give a file, a folder or a glob", name=name, spec=spec)
    return sources


def held_out(spec: str) -> list[Source]:
    """The files for validation in the folders of `--train_file`; none where their names say nothing of it.

    Raises:
        UserError: as `find`.
    """
    files = [(number, file) for number, part in enumerate(parts_of(spec)) for file in listing(part).validation]
    return _detected(files, "--train_file", [])


def _detected(files: Iterable[tuple[int, Place]], name: str, problems: list[str]) -> list[Source]:
    """What is in the files of numbered parts, each once; raises UserError with these and its own problems, if there are
    any.
    """
    sources: dict[Place, Source] = {}
    for number, file in files:
        with collected(problems):
            sources.setdefault(file, detect(file, name, number))
    refuse(problems)
    return list(sources.values())


def parts_of(spec: str) -> list[str]:
    """Part at commas, except where the whole is the name of a file."""
    whole = spec.strip()
    if os.path.exists(whole):  # `Path.exists` would raise for a list that is too long for a name.
        return [whole]
    return [part for part in map(str.strip, whole.split(",")) if part]


def set_names(spec: str | None) -> list[str]:
    """The names of the validation sets in `news=a.jsonl,law=b.jsonl`; none where no set has a name.

    Raises:
        UserError: some files stand before the first name.
    """
    names = [name for name, _ in groupby(_named_parts(spec or ""), itemgetter(0))]
    if names == [""]:
        return []
    if "" in names:
        problem = say("has files before the first name")
    elif len(set(names)) < len(names):
        problem = say("has a set twice")
    else:
        return names
    raise UserError(
        "--validation_file = {value}, {what}; write NAME=FILE,FILE,OTHER=FILE", value=public(spec or ""), what=problem
    )


def numbered_parts(spec: str, name: str) -> list[tuple[int, str]]:
    """The parts of what the user named, each with the number that its rows are known by: of its set where sets have
    names.
    """
    names = set_names(spec) if name == "--validation_file" else []
    if not names:
        return list(enumerate(parts_of(spec)))
    return [(names.index(set_name), part) for set_name, part in _named_parts(spec)]


def _named_parts(spec: str) -> list[tuple[str, str]]:
    """Each part with the name of its set, which lasts until the next; empty before the first. A file that is there has
    no name.
    """
    parts = []
    name = ""
    for part in parts_of(spec):
        match = _NAMED_SET.fullmatch(part)
        if match and not os.path.exists(part):
            name, part = match.groups()
        parts.append((name, part))
    return parts


def listing(part: str, name: str = "--train_file") -> Listing:
    """The files that one part of what the user named stands for.

    Args:
        name: of the setting, which decides which split of a folder is meant.
    Raises:
        UserError: an address cannot be read, or a saved dataset not be used. OSError: a folder cannot be read.
    """
    path = local_path(part)
    if path is None:
        return _list_address(part, name)
    if path.is_dir():
        return list_folder(path, name)
    if path.exists():
        return Listing([path])
    base = next(parent for parent in path.parents if parent.is_dir())  # A folder that is there may be named `[1]`.
    names = sorted(glob.glob(str(path.relative_to(base)), root_dir=base, recursive=True))
    files = filter(Path.is_file, map(base.joinpath, names))
    return Listing([*files])


def _list_address(address: str, name: str) -> Listing:
    of_split = _HUB_SPLIT.fullmatch(address)
    if of_split:
        folder, split = of_split.groups()
        # As the hub names files: data/test-00000-of-00001.parquet, test/0000.parquet, test.jsonl.
        begin = re.compile(rf"{re.escape(split)}([-._]|$)")
        files = {file: path for file, path in list_remote(folder, name) if any(map(begin.match, path.parts))}
        return Listing.of_files(files, "")
    files = dict(list_remote(address, name))
    if is_glob(address) or PurePosixPath() in files.values():
        return Listing(list(files))
    return Listing.of_files(files, name)


def _files_of(part: str, name: str) -> Sequence[Place]:
    """The files of one part that are read, without empty ones beside others."""
    try:
        files = listing(part, name).files
        files = [file for file in files if file.stat().st_size] or files
    except OSError as error:
        raise UserError(
            "{name} = {part}, {file} cannot be read: {reason}; give a folder that can be read whole",
            name=name,
            part=part,
            file=error.filename,
            reason=reason_of(error),
        ) from None
    if files:
        return files
    if local_path(part) is None:
        raise UserError(
            "{name} = {part}, holds no data file; give a file, a folder or a glob with *", name=name, part=public(part)
        )
    if Path(part).is_dir():
        raise UserError(
            "{name} = {part}, holds no data file; give one with files that end in {endings}",
            name=name,
            part=part,
            endings=join(", ", KINDS_OF_FOLDERS),
        )
    hint = near_path(part, Path.is_file)
    raise UserError(
        "{name} = {part}, no such file; give a file, a folder or a glob{hint}", name=name, part=part, hint=hint
    )


def source_facts(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """Name, kind, size and time of change of each source, for the manifest."""
    facts = []
    for source in sources:
        state = source.path.stat()
        fact = {
            "path": str(source.path.resolve()),
            "kind": source.kind,
            "bytes": state.st_size,
            "modified_ns": state.st_mtime_ns,
            "part": source.part,
        }
        if source.kind == TSV:  # Shards that were written by the rule of earlier versions are written anew.
            fact["quotes"] = "where cells have them"
        facts.append(fact)
    return facts


def sources_fingerprint(sources: Iterable[Source]) -> str:
    """Hash names, sizes and times of change: another value means that the data may have changed."""
    return fingerprint(source_facts(sources))
