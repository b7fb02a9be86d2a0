"""Which files of a folder hold rows, and to which split they belong."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path, PurePath
from typing import Any

from data.sources.formats import KIND_BY_SUFFIX
from data.sources.places import Place
from data.sources.source import data_suffix
from data.text.cells import json_object
from settings.errors import UserError
from settings.fields import listed

KINDS_OF_FOLDERS = tuple(suffix for suffix in KIND_BY_SUFFIX if suffix != ".md")
HIDDEN = (".", "_")  # how names begin that are passed over in a folder
# Those of the system are in the root of a disk, and often closed.
HIDDEN_FOLDERS = (*HIDDEN, "lost+found", "System Volume Information", "$RECYCLE.BIN")
# What these describe is a dataset, prepared rows or a model.
NO_ROWS = (
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json", "manifest.json"),
    *("config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("vocab.json", "special_tokens_map.json", "added_tokens.json", "prompt_template.json"),
    "model.safetensors.index.json",
)
# `datasets` keeps what map() gave beside its data.
CACHED = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")
# Words in names of folders and files that say to which split a file belongs, as Hugging Face `datasets` has them.
SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
BETWEEN_WORDS = re.compile(r"[-._ 0-9/\\]+")
# setting -> the splits of a folder that it means, the first that is there
SPLITS_OF = {"--train_file": ("train",), "--validation_file": ("validation", "test")}


@dataclass(frozen=True)
class Listing:
    """The files of one part of what the user named.

    Args:
        files: are read. descriptions: `.json` of a folder beside other data files, which it mostly describes: left out.
            Those that never hold rows are not among them.
        validation, test, unsorted: of a folder in which names of files say train, those that say something else, or
            nothing.
        unheeded: those that say validation or test and are read all the same, as no other says train.
    """

    files: Sequence[Place]
    descriptions: Sequence[Place] = ()
    validation: Sequence[Place] = ()
    test: Sequence[Place] = ()
    unsorted: Sequence[Place] = ()
    unheeded: Sequence[Place] = ()

    @classmethod
    def of_files(cls, files: Mapping[Place, PurePath], name: str) -> Listing:
        """Sort out the files of a folder.

        Args:
            files: each with its path inside the folder. name: of the setting, which decides which split is meant.
        """
        data_files = {file: path for file, path in files.items() if _may_hold_rows(path)}
        rows = {file: path for file, path in data_files.items() if data_suffix(path) != ".json"} or data_files
        descriptions = [file for file in data_files if file not in rows]
        by_split = _by_split(rows)
        if name not in SPLITS_OF:
            return cls(list(rows), descriptions)
        split = next((split for split in SPLITS_OF[name] if by_split[split]), None)
        if split is None:
            return cls(list(rows), descriptions, unheeded=[*by_split["validation"], *by_split["test"]])
        split_files = by_split.pop(split)
        return cls(split_files, descriptions, by_split.get("validation", ()), by_split.get("test", ()), by_split[""])


def _by_split(files: Mapping[Place, PurePath]) -> dict[str, list[Place]]:
    """The files of each split by the names of their folders, or where these say nothing by their own; of "" the
    others.
    """
    splits = [_split_of(str(path.parent)) for path in files.values()]
    if not any(splits):
        splits = [_split_of(path.name) for path in files.values()]
    by_split: dict[str, list[Place]] = {split: [] for split in (*SPLIT_WORDS, "")}
    for file, split in zip(files, splits, strict=True):
        by_split[split].append(file)
    return by_split


def _split_of(path: str) -> str:
    """The split that a word of a path says; empty where none does."""
    words = set(BETWEEN_WORDS.split(path.lower()))
    return next((split for split, names in SPLIT_WORDS.items() if names & words), "")


def _may_hold_rows(path: PurePath) -> bool:
    """Whether a file with this path inside a folder is one of its data files."""
    is_hidden = any(part.startswith(HIDDEN) for part in path.parts)
    is_other = is_hidden or path.name.lower() in NO_ROWS or CACHED.fullmatch(path.name) is not None
    return data_suffix(path) in KINDS_OF_FOLDERS and not is_other


def list_folder(folder: Path, name: str) -> Listing:
    """The files of a folder, or of a dataset that `save_to_disk` of Hugging Face `datasets` wrote there.

    Args:
        name: of the setting.
    Raises:
        UserError: the dataset cannot be used. OSError: a folder cannot be read.
    """
    splits = json_object(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        return _list_saved_splits(folder, splits, name)
    saved = _saved_files(folder, name)
    if saved:
        return Listing(saved)
    return Listing.of_files({file: file.relative_to(folder) for file in sorted(_files_below(folder))}, name)


def _files_below(folder: Path) -> Iterator[Path]:
    """The files below a folder and folders linked from it, each folder once.

    Raises:
        OSError: a folder cannot be read: its rows would be missing without a word.
    """

    def refuse(error: OSError) -> None:
        raise error

    visited: set[str] = set()
    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(root)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN_FOLDERS))
        yield from filter(Path.is_file, map(Path(root).joinpath, files))


def _list_saved_splits(folder: Path, splits: Sequence[Any], name: str) -> Listing:
    """The files of a saved dictionary of datasets: those of the split that is meant, and of others what can be read."""
    wanted_splits = SPLITS_OF.get(name, ("train",))
    split = next((split for split in wanted_splits if split in splits), None)
    if split is None:
        raise UserError(
            "{name} = {folder}, has the splits {splits} and no {wanted}; give the folder of one",
            name=name,
            folder=folder,
            splits=listed(splits),
            wanted=wanted_splits[0],
        )
    files: dict[str, Sequence[Path]] = {"files": _saved_files(folder / split, name)}
    for other in {"validation", "test"}.intersection(splits) - {*wanted_splits}:
        with suppress(UserError):  # A split without rows is none.
            files[other] = _saved_files(folder / other, name)
    return Listing(**files)


def _saved_files(folder: Path, name: str) -> list[Path]:
    """The files of a saved dataset; none if it is no such folder.

    Raises:
        UserError: it has no rows, or not all of its files.
    """
    state = json_object(folder / "state.json")
    files = state.get("_data_files")
    if not isinstance(files, list):
        return []
    if state.get("_indices_data_files"):
        raise UserError(
            "{name} = {folder}, keeps only a selection of its rows; save it again after flatten_indices()",
            name=name,
            folder=folder,
        )
    if not files:
        raise UserError(
            "{name} = {folder}, is a saved dataset without rows; give one with rows", name=name, folder=folder
        )
    try:
        paths = [folder / file["filename"] for file in files]
    except (TypeError, KeyError):
        raise UserError(
            "{name} = {folder}, names no files; save the dataset again", name=name, folder=folder / "state.json"
        ) from None
    missing = next(filterfalse(Path.is_file, paths), None)
    if missing is not None:
        raise UserError(
            "{name} = {missing}, is missing, state.json lists it; save the dataset again", name=name, missing=missing
        )
    return paths
