"""Sizes and SHA-256 of a folder's files, in `checksums.json` beside them.

It is written last, by whoever fills the folder, and compared by whoever uses it: a file that was cut off, or in which a
bit has changed, is named instead of being loaded. Folders without it (older ones, those of other programs) load as ever.
`sha256sum` gives the same numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from language import say
from settings.errors import UserError, reason_of
from storage import MOST_TABLE_BYTES, digest, read_text

CHECKSUMS_FILE = "checksums.json"
STATE = "state"  # what only resuming needs lies below it, and is not published
Entry = dict[str, Any]


def describe(folder: Path) -> dict[str, Entry]:
    """Path inside the folder -> size in bytes and SHA-256, of every file. Memory: 1 MiB; time: one reading."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(_files(folder))
    }


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
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(is_inside(name) and _is_entry(entry) for name, entry in files.items()):
        raise UserError("{path}, is damaged: it holds no sums of files of its folder; copy the folder again", path=path)
    return dict(content)


def damages(folder: Path, deep: bool = True, with_state: bool = True) -> list[str]:
    """Find the files that are not as they were written.

    Args:
        deep: compare contents; else sizes alone, which takes no time. with_state: also what only resuming needs.
    Returns:
        one sentence for each; none where all is well, or where there are no sums.
    Memory: 1 MiB.
    """
    try:
        sums = read_sums(folder)
    except UserError as error:
        return error.problems
    if sums is None:
        return []
    files = {name: entry for name, entry in sums["files"].items() if with_state or not name.startswith(f"{STATE}/")}
    found = (_damage(folder / name, entry, deep) for name, entry in files.items())
    return [damage for damage in found if damage]


def refuse_damaged(folder: Path, flag: str) -> None:
    """Raise where files of a model folder are not as they were written.

    Args:
        flag: the setting that names the folder, for the message.
    Raises:
        UserError: each damaged file.
    """
    found = damages(folder, with_state=False)
    if found:
        advice = say(
            "copy the folder again; where you have changed it on purpose, remove its {checksums_file}",
            checksums_file=CHECKSUMS_FILE,
        )
        raise UserError(
            *(
                say("--{flag} = {folder}, {damage}; {advice}", flag=flag, folder=folder, damage=damage, advice=advice)
                for damage in found
            )
        )


def is_inside(name: object) -> bool:
    """Whether a name of a file stays inside the folder that it is joined to."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name or ":" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _files(folder: Path) -> Iterator[Path]:
    for base, _, names in os.walk(folder):
        yield from (Path(base, name) for name in names if (base, name) != (str(folder), CHECKSUMS_FILE))


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)


def _damage(path: Path, entry: Entry, deep: bool) -> str:
    try:
        if not path.is_file():
            return say("{path} is missing", path=path)
        size = path.stat().st_size
        if size != entry["bytes"]:
            return say(
                "{path} is damaged: it has {size:,} bytes and was written with {bytes:,}",
                path=path,
                size=size,
                bytes=entry["bytes"],
            )
        if deep and digest(path) != entry["sha256"]:
            return say("{path} is damaged: its content is not what was written", path=path)
    except OSError as error:
        return say("{path} cannot be read: {reason}", path=path, reason=reason_of(error))
    return ""
