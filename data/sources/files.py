"""The files that the user means, what is in them, and whether they have changed.

A source is one file, here or at an address: plain text, JSONL, CSV, TSV or FASTA (each plain or compressed with gzip, bzip2,
xz or zstandard), Parquet, or Arrow IPC as file or as stream (Hugging Face's `.arrow`). What a file is follows from its first
bytes where these tell, else from its ending. A folder that Hugging Face `datasets` saved gives the files that it lists,
a saved dictionary of splits the split that is wanted. `reading` turns sources into rows.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any

from data.sources.places import Place, is_address, list_remote, local_path, public, readable
from formats import (
    ARROW_FILE,
    ARROW_STREAM,
    COMPRESSED_SUFFIXES,
    ENCRYPTED,
    JSON,
    JSONL,
    KIND_BY_SUFFIX,
    PARQUET,
    TEXT,
    TSV,
)
from language import join, say
from settings.errors import UserError, reason_of, refuse
from settings.fields import at_home, listed, near_path
from storage import fingerprint, read_text

KINDS_OF_FOLDERS = tuple(suffix for suffix in KIND_BY_SUFFIX if suffix != ".md")
OF_THE_SYSTEM = {"lost+found", "System Volume Information", "$RECYCLE.BIN"}  # in the root of a disk, and often closed
HIDDEN = (".", "_")  # how names begin that are passed over in a folder
NO_ROWS = {  # what these describe is a dataset, prepared rows or a model
    "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json", "manifest.json",
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
    "special_tokens_map.json", "added_tokens.json", "prompt_template.json", "model.safetensors.index.json",
}  # fmt: skip
# words in names of folders and files that say to which split a file belongs, and what parts words: as Hugging Face `datasets` has them
SPLIT_WORDS = {
    "train": {"train", "training"}, "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}  # fmt: skip
# setting -> the splits of a folder that it means, the first that is there
SPLITS_OF = {"--train_file": ("train",), "--validation_file": ("validation", "test")}
_SET = re.compile(r"([\w.-]+)=(.+)")  # a validation set with its name
_HUB_SPLIT = re.compile(r"(hf://[^:?]+):([\w-]+)")  # a split of a data set
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")
COMPRESSION_BY_MAGIC = {
    b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd",
    **dict.fromkeys((b"BZh%d1AY&SY" % level for level in range(1, 10)), "bzip2"),
    **{bytes([number, 0x2A, 0x4D, 0x18]): "zstd" for number in range(0x50, 0x60)},  # a frame to skip comes first: pzstd's sizes
}  # fmt: skip
CACHED = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")  # what `datasets` keeps of map() beside its data
TABLES = (PARQUET, ARROW_FILE, ARROW_STREAM)
OBJECTS = (JSONL, JSON)  # one object a line, or all in one array
FIRST_BYTES = 512  # of a file, which tell what it is
# how other things begin that a failed download leaves under a data file's name
STRANGERS = {
    b"version https://git-lfs": "is a git-lfs pointer instead of the file itself; run `git lfs pull` in the clone, or download the file",
    b"<!doctype html": "is an HTML page, not {kind}: probably a saved sign-in or preview page; download the raw file (on the "
            "Hugging Face hub, use /resolve/ in the address, not /blob/)",
    b"<html": "is an HTML page, not {kind}: probably a saved sign-in or preview page; download the raw file (on the "
            "Hugging Face hub, use /resolve/ in the address, not /blob/)",
    b"\xff\xfe": "is UTF-16; save it as UTF-8", b"\xfe\xff": "is UTF-16; save it as UTF-8",
    b"pk\x03\x04": "is a zip archive (as are Excel and Word files); unpack it, or save the sheet as CSV",
    **dict.fromkeys((b"rar!\x1a", b"7z\xbc\xaf"), "is an archive; unpack it"),
    b"%pdf-": "is a PDF; save its text as UTF-8",
    b"sqlite format 3\0": "is a database; export its rows to JSONL, CSV or Parquet",
}  # fmt: skip
TAR, TAR_AT = b"ustar", 257
NULS = 16  # of so many bytes of a text one may be NUL; of UTF-16 each second one is, and of other files many are


@dataclass(frozen=True)
class Source:
    """One file of rows.

    Args:
        path: where it is; kind: one of the eight above; compression: gzip, bzip2, xz, zstd or None.
        part: which of the parts separated by commas it comes from, counted from 0.
    """

    path: Place
    kind: str
    compression: str | None = None
    part: int = 0


def find(spec: str, name: str = "--train_file") -> list[Source]:
    """Find the files that a user means.

    Args:
        spec: a file, a folder (the data files below it, in the order of their names, as `listing` sorts them), a glob, an
        address of these, or several separated by commas; of `--validation_file` also sets by name. name: what messages call it.
    Returns:
        one or more sources, without repetition.
    Raises:
        UserError: all problems at once.
    """
    sources, problems = dict[Place, Source](), list[str]()
    for number, part in numbered_parts(spec, name):
        files: Sequence[Place] = ()
        with collected(problems):
            files = _files_of(part, name)
        for file in files:
            with collected(problems):
                sources.setdefault(file, detect(file, name, number))
    if problems or not sources:
        raise UserError(
            *(
                dict.fromkeys(problems)
                or [say("{name} = {spec}, names no file; give a file, a folder or a glob", name=name, spec=spec)]
            )
        )
    return list(sources.values())


def held_out(spec: str) -> list[Source]:
    """The files for validation in the folders of `--train_file`; none where their names say nothing of it.

    Raises:
        UserError: as `find`.
    """
    sources, problems = dict[Place, Source](), list[str]()
    for number, part in enumerate(parts_of(spec)):
        for file in listing(part).validation:
            with collected(problems):
                sources[file] = detect(file, "--train_file", number)
    refuse(problems)
    return list(sources.values())


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """A context whose UserError is added to others, to be raised with them."""
    try:
        yield
    except UserError as error:
        problems += error.problems


def parts_of(spec: str) -> list[str]:
    """Part at commas, except where the whole is the name of a file."""
    whole = spec.strip()
    is_file = os.path.exists(whole)  # which a list too long for a name is not; `Path.exists` would raise
    return [whole] if is_file else [part.strip() for part in whole.split(",") if part.strip()]


def set_names(spec: str | None) -> list[str]:
    """The names of the validation sets in `news=a.jsonl,law=b.jsonl`; none where no set has a name.

    Raises:
        UserError: some files stand before the first name.
    """
    names = [name for name, _ in groupby(_named_parts(spec or ""), lambda part: part[0])]
    if any(names) and (not names[0] or len(set(names)) < len(names)):
        what = say("has a set twice") if names[0] else say("has files before the first name")
        raise UserError(
            "--validation_file = {value}, {what}; write NAME=FILE,FILE,OTHER=FILE", value=public(spec or ""), what=what
        )
    return [name for name in names if name]


def numbered_parts(spec: str, name: str) -> list[tuple[int, str]]:
    """The parts of what the user named, each with the number that its rows are known by: of its set where sets have names."""
    names = set_names(spec) if name == "--validation_file" else []
    if not names:
        return list(enumerate(parts_of(spec)))
    return [(names.index(of), part) for of, part in _named_parts(spec)]


def _named_parts(spec: str) -> list[tuple[str, str]]:
    """Each part with the name of its set, which lasts until the next; empty before the first. A file that is there has no name."""
    found, current = list[tuple[str, str]](), ""
    for part in parts_of(spec):
        named = None if os.path.exists(part) else _SET.fullmatch(part)
        current, file = named.groups() if named else (current, part)
        found.append((current, file))
    return found


@dataclass(frozen=True)
class Listing:
    """The files of one part of what the user named.

    Args:
        taken: are read. descriptions: `.json` of a folder beside other data files, which it mostly describes: left out. Those that
            never hold rows are not among them.
        validation, test, others: of a folder in which names of files say train, those that say something else, or nothing.
        unheeded: those that say validation or test and are read all the same, as no other says train.
    """

    taken: Sequence[Place]
    descriptions: Sequence[Place] = ()
    validation: Sequence[Place] = ()
    test: Sequence[Place] = ()
    others: Sequence[Place] = ()
    unheeded: Sequence[Place] = ()

    @classmethod
    def of_folder(cls, files: Mapping[Place, PurePath], name: str) -> Listing:
        """Sort out the data files of a folder.

        Args:
            files: each with its path inside the folder. name: of the setting, which decides which split is meant.
        """
        described = [file for file in files if _data_suffix(file) == ".json"]
        kept = [file for file in files if _data_suffix(file) != ".json"] or described
        descriptions = described if kept is not described else []
        if name not in SPLITS_OF:
            return cls(kept, descriptions)
        in_folders = {file: _split_of(files[file].parent.parts) for file in kept}
        splits = in_folders if any(in_folders.values()) else {file: _split_of(files[file].parts[-1:]) for file in kept}
        by_split = {split: [file for file in kept if splits[file] == split] for split in (*SPLIT_WORDS, "")}
        wanted = next((split for split in SPLITS_OF[name] if by_split[split]), None)
        if wanted is None:
            return cls(kept, descriptions, unheeded=[*by_split["validation"], *by_split["test"]])
        others = {split: found for split, found in by_split.items() if split != wanted}
        return cls(by_split[wanted], descriptions, others.get("validation", ()), others.get("test", ()), others[""])


def _split_of(names: Sequence[str]) -> str:
    """The split that a word of these names says; empty where none does."""
    words = {word for name in names for word in _BETWEEN_WORDS.split(name.lower())}
    return next((split for split, known in SPLIT_WORDS.items() if known & words), "")


def listing(part: str, name: str = "--train_file") -> Listing:
    """The files that one part of what the user named stands for."""
    if is_address(part):
        path = local_path(part)
        if path is None:
            by_split = _HUB_SPLIT.fullmatch(part)
            remote = list_remote(by_split[1] if by_split else part, name)
            if by_split:  # as the hub names files: data/test-00000-of-00001.parquet, test/0000.parquet, test.jsonl
                begins = re.compile(rf"{re.escape(by_split[2])}([-._]|$)")
                inside_split = [file for file, inside in remote if any(map(begins.match, inside.parts))]
                return Listing([file for file in inside_split if _belongs_to_folder(PurePath(file.name))])
            is_glob = any(letter in part.partition("?")[0] for letter in "*[")
            if is_glob or not all(inside.name for _, inside in remote):
                return Listing([file for file, _ in remote])
            return Listing.of_folder({file: inside for file, inside in remote if _belongs_to_folder(inside)}, name)
    else:
        path = Path(at_home(part))
    if path.is_dir():
        saved = _saved_dataset(path, name)
        if saved is not None:
            splits = _json(path / "dataset_dict.json").get("splits", ()) if name == "--train_file" else ()
            others: dict[str, Sequence[Path]] = {}
            for split in ("validation", "test"):
                with suppress(UserError):  # one without rows is none
                    others |= {split: _saved_dataset(path / split, name) or ()} if split in splits else {}
            return Listing(saved, **others)
        below = ((file, file.relative_to(path)) for file in _below(path) if file.is_file())
        return Listing.of_folder(dict(sorted(each for each in below if _belongs_to_folder(each[1]))), name)
    if path.exists():
        return Listing([path])
    base = next(parent for parent in path.parents if parent.is_dir())  # a folder that is there may be named `[1]`
    found = glob.glob(str(path.relative_to(base)), root_dir=base, recursive=True)
    return Listing([file for file in (base / name for name in sorted(found)) if file.is_file()])


def _below(folder: Path) -> Iterator[Path]:
    """The files below a folder and folders linked from it, each folder once.

    Raises:
        OSError: a folder cannot be read: its rows would be missing without a word.
    """

    def refuse(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN) and name not in OF_THE_SYSTEM)
        yield from (Path(root, name) for name in files)


def _saved_dataset(folder: Path, name: str) -> list[Path] | None:
    """The files of a dataset that `save_to_disk` of Hugging Face `datasets` wrote; None if it is no such folder."""
    splits = _json(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        wanted = SPLITS_OF.get(name, ("train",))
        split = next((split for split in wanted if split in splits), None)
        if split is None:
            told = "{name} = {folder}, has the splits {splits} and no {wanted}; give the folder of one"
            raise UserError(say(told, name=name, folder=folder, splits=listed(splits), wanted=wanted[0]))
        folder = folder / split
    state = _json(folder / "state.json")
    files = state.get("_data_files")
    if not isinstance(files, list):
        return None
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
    names = [file.get("filename") if isinstance(file, dict) else None for file in files]
    if not all(isinstance(file, str) for file in names):
        raise UserError(
            "{name} = {folder}, names no files; save the dataset again", name=name, folder=folder / "state.json"
        )
    paths = [folder / str(file) for file in names]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise UserError(
            "{name} = {missing}, is missing, state.json lists it; save the dataset again", name=name, missing=missing[0]
        )
    return paths


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _belongs_to_folder(path: PurePath) -> bool:
    if (
        any(part.startswith(HIDDEN) for part in path.parts)
        or path.name.lower() in NO_ROWS
        or CACHED.fullmatch(path.name)
    ):
        return False
    return _data_suffix(path) in KINDS_OF_FOLDERS


def _data_suffix(path: Place | PurePath) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _files_of(part: str, name: str) -> Sequence[Place]:
    """The files of one part that are read, without empty ones beside others."""
    try:
        files = listing(part, name).taken
        files = [file for file in files if file.stat().st_size] or files
    except OSError as error:
        told = "{name} = {part}, {file} cannot be read: {reason}; give a folder that can be read whole"
        raise UserError(say(told, name=name, part=part, file=error.filename, reason=reason_of(error))) from None
    if files:
        return files
    if is_address(part) and local_path(part) is None:
        told = "{name} = {part}, holds no data file; give a file, a folder or a glob with *"
        raise UserError(say(told, name=name, part=public(part)))
    if Path(part).is_dir():
        endings = join(", ", KINDS_OF_FOLDERS)
        told = "{name} = {part}, holds no data file; give one with files that end in {endings}"
        raise UserError(say(told, name=name, part=part, endings=endings))
    told, hint = "{name} = {part}, no such file; give a file, a folder or a glob{hint}", near_path(part, Path.is_file)
    raise UserError(say(told, name=name, part=part, hint=hint))


def detect(path: Place, name: str, part: int = 0) -> Source:
    """What is in a file.

    Args:
        name: of the setting, for messages. part: of which it is.
    Raises:
        UserError: it cannot be read, is empty, or no data.
    """
    if isinstance(path, Path) and not path.is_file():  # a pipe or a device has no end, or cannot be read twice
        told = "{name} = {path}, is not an ordinary file; write its content to a file, and give that"
        raise UserError(say(told, name=name, path=path))
    with readable(f"{name} = {path}", is_far=not isinstance(path, Path)), path.open("rb") as file:
        start = file.read(FIRST_BYTES)
    kind = KIND_BY_SUFFIX.get(_data_suffix(path), TEXT)
    compression = next((how for magic, how in COMPRESSION_BY_MAGIC.items() if start.startswith(magic)), None)
    is_archive = start[TAR_AT:].startswith(TAR) or _data_suffix(path) in (".tar", ".tgz")
    problem = ""
    if not start:
        problem = say("is empty; give a file with rows")
    elif is_archive:
        problem = say("is an archive; unpack it")
    elif compression and kind in TABLES:
        problem = say(
            "is packed with {compression}; unpack it first, {kind} packs by itself", compression=compression, kind=kind
        )
    elif not compression:
        kind, problem = _unpacked_kind(start, kind)
    if problem:
        raise UserError(say("{name} = {value}, {problem}", name=name, value=path, problem=problem))
    return Source(path, kind, compression, part)


def _unpacked_kind(start: bytes, kind: str) -> tuple[str, str]:
    """What a file that is not packed is by its first bytes, where these say so, and what is wrong with it."""
    begins = start.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    for magic, what in STRANGERS.items():
        if begins.startswith(magic) and not (kind == TEXT and b"<" in magic):  # a page may be text
            return kind, say(what, kind=kind)
    if start.startswith(b"PAR1"):
        return PARQUET, ""
    if start.startswith(b"ARROW1"):
        return ARROW_FILE, ""
    if start.startswith(b"\xff\xff\xff\xff") and len(start) >= 8:
        return ARROW_STREAM, ""
    if kind == PARQUET and start.startswith(b"PARE"):
        return kind, say(ENCRYPTED)
    if kind in TABLES:
        return kind, say("does not begin like {kind}; it is another format or broken, write it again", kind=kind)
    if kind == TEXT and start.count(b"\0") * NULS > len(start):
        return kind, say("holds many NUL bytes and is not UTF-8 text")
    return JSON if kind == JSONL and begins[:1] == b"[" else kind, ""


def source_facts(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """Name, kind, size and time of change of each source, for the manifest."""
    facts = []
    for source in sources:
        state = source.path.stat()
        facts.append(
            {"path": str(source.path.resolve()), "kind": source.kind, "bytes": state.st_size,
             "modified_ns": state.st_mtime_ns, "part": source.part}
        )  # fmt: skip
        if source.kind == TSV:  # what was made of it by another rule is made anew
            facts[-1]["quotes"] = "where cells have them"
    return facts


def sources_fingerprint(sources: Iterable[Source]) -> str:
    """Hash names, sizes and times of change: another value means that the data may have changed."""
    return fingerprint(source_facts(sources))
