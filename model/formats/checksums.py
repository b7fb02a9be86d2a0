"""Sizes and SHA-256 of a folder's files, in `checksums.json` beside them.

It is written last, by whoever fills the folder, and compared by whoever uses it: a file that was cut off, or in which a
bit has changed, is named instead of being loaded. Folders without it (older ones, those of other programs) load as
ever. `sha256sum` gives the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from settings.errors import UserError, reason_of, refuse
from support.language import say
from support.storage import MOST_TABLE_BYTES, digest, read_text

CHECKSUMS_FILE = "checksums.json"
CARD_FILE = "README.md"  # It has no sum: its owner may rewrite it.
STATE = "state"  # what only resuming needs lies below it, and is not published
Entry = dict[str, Any]


def describe(folder: Path) -> dict[str, Entry]:
    """Path inside the folder -> size in bytes and SHA-256, of every file but the model card.

    Memory: 1 MiB. Time: one reading.
    """
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in (folder / CHECKSUMS_FILE, folder / CARD_FILE)
    }


def published_files(folder: Path) -> list[Path]:
    """The files of a model: all but their sums and what only resuming needs."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / CHECKSUMS_FILE and not path.is_relative_to(folder / STATE)
    ]


def seal(folder: Path, **facts: Any) -> None:
    """Write the sums of all files into the folder, and `facts` beside them."""
    write_sums(folder / CHECKSUMS_FILE, describe(folder), **facts)


def write_sums(path: Path, files: dict[str, Entry], **facts: Any) -> None:
    """Write sums that are known already."""
    content = {"format": 1, **facts, "files": files}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf8")


def read_sums(folder: Path) -> dict[str, Any] | None:
    """The content of `checksums.json`; None where there is none.

    Raises:
        UserError: it is no such file, or names files outside of its folder.
    """
    path = folder / CHECKSUMS_FILE
    try:
        content = json.loads(read_text(path, MOST_TABLE_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("{path}, is damaged ({error}); copy the folder again", path=path, error=error) from None
    match content:
        case {"files": {**files}} if all(map(_is_entry, files.items())):
            return dict(content)
    raise UserError("{path}, is damaged: it holds no sums of files of its folder; copy the folder again", path=path)


def _is_entry(item: tuple[object, object]) -> bool:
    match item:
        case name, {"bytes": int(), "sha256": str()}:
            return is_inside(name)
    return False


def is_inside(name: object) -> bool:
    """Whether a name of a file stays inside the folder that it is joined to."""
    if not isinstance(name, str) or set(name) & {"\\", "\0", ":"}:
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and {"/", "//", ".."}.isdisjoint(parts)


def damages(folder: Path, deep: bool = True, with_state: bool = True) -> list[str]:
    """Find the files that are not as they were written.

    Args:
        deep: compare contents; else sizes alone, which takes no time. with_state: also what only resuming needs.
    Returns:
        one sentence for each; none where all is well, or where there are no sums.
    Memory: 1 MiB.
    """
    try:
        sums = read_sums(folder) or {"files": {}}
    except UserError as error:
        return error.problems
    left_out = () if with_state else (f"{STATE}/",)
    return [
        problem
        for name, entry in sums["files"].items()
        if name != CARD_FILE and not name.startswith(left_out)  # Earlier versions wrote a sum of the card.
        for problem in _damage(folder / name, entry, deep)
    ]


def _damage(path: Path, entry: Entry, deep: bool) -> Iterator[str]:
    """What is wrong with one file, if anything is."""
    try:
        if not path.is_file():
            yield say("{path} is missing", path=path)
        elif path.stat().st_size != entry["bytes"]:
            yield say(
                "{path} is damaged: it has {size:,} bytes and was written with {bytes:,}",
                path=path,
                size=path.stat().st_size,
                bytes=entry["bytes"],
            )
        elif deep and digest(path) != entry["sha256"]:
            yield say("{path} is damaged: its content is not what was written", path=path)
    except OSError as error:
        yield say("{path} cannot be read: {reason}", path=path, reason=reason_of(error))


def refuse_damaged(folder: Path, flag: str) -> None:
    """Raise where files of a model folder are not as they were written.

    Args:
        flag: the setting that names the folder, for the message.
    Raises:
        UserError: each damaged file.
    """
    advice = say(
        "copy the folder again; where you have changed it on purpose, remove its {checksums_file}",
        checksums_file=CHECKSUMS_FILE,
    )
    refuse(
        [
            say("--{flag} = {folder}, {damage}; {advice}", flag=flag, folder=folder, damage=damage, advice=advice)
            for damage in damages(folder, with_state=False)
        ]
    )
