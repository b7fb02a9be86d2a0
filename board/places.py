"""The files that the page may touch: those of runs, of models and of the chosen data folder.

Whatever a browser names is a name inside one of three folders. It is resolved, links included, before it is opened: what
lies outside does not exist for the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats import COMPRESSED_SUFFIXES, KIND_BY_SUFFIX
from language import localized, say
from run_files import run_names
from settings.fields import is_encodable
from settings.names import name_problem, shown_name

DATA_SUFFIXES = (*KIND_BY_SUFFIX, *COMPRESSED_SUFFIXES)
OF_PROGRAMS = {"config.json", "adapter_config.json", "manifest.json", "tokenizer.json"}  # of a model, of prepared rows


class Outside(ValueError):
    """A name that leads out of the folders, or is not a name at all."""


@dataclass(frozen=True)
class Places:
    """The three folders of the page.

    Args:
        log_dir, output_dir: as the runs have them. data_dir: where data files are picked from and uploaded to.
    """

    log_dir: Path
    output_dir: Path
    data_dir: Path

    def names(self) -> list[str]:
        """Names of all runs."""
        return run_names(self.log_dir, self.output_dir)

    def logs(self, name: str) -> Path:
        """The log folder of a run."""
        return inside(self.log_dir, checked_name(name))

    def saved(self, name: str) -> Path:
        """The model folder of a run."""
        return inside(self.output_dir, checked_name(name))

    def both(self, name: str) -> tuple[Path, Path]:
        """The log folder and the model folder of a run that is there, also of one whose name a new one could not have.

        Raises:
            Outside: the name leads elsewhere.
        """
        if Path(name).name != name:
            raise Outside(say("{shown_name!r} is not a folder name", shown_name=shown_name(name)))
        return inside(self.log_dir, name), inside(self.output_dir, name)

    def data(self, relative: str) -> Path:
        """A file of the data folder, which is there: no pattern, no list and no address, as a flag could hold.

        Raises:
            Outside: it is none.
        """
        path = inside(self.data_dir, relative)
        if not path.is_file():
            raise Outside(say("there is no data file {relative!r}", relative=relative[:80]))
        return path

    def model(self, relative: str) -> Path:
        """A model folder: that of a run, or of one of its checkpoints.

        Raises:
            Outside: it is none.
        """
        path = inside(self.output_dir, relative)
        if not path.is_dir() or path.resolve() == self.output_dir.resolve():
            raise Outside(say("there is no model {relative!r}", relative=relative[:80]))
        return path

    def data_files(self, most: int = 500) -> list[dict[str, Any]]:
        """The data files below the data folder, newest first."""
        found = []
        for path in self._data_paths():
            name = path.relative_to(self.data_dir).as_posix()
            if not is_encodable(name):  # it fits into no address
                continue
            facts = path.stat()
            found.append({"name": name, "bytes": facts.st_size, "time": facts.st_mtime})
            if len(found) >= most:
                break
        return sorted(found, key=lambda file: -file["time"])

    def _data_paths(self) -> Iterator[Path]:
        """The same as paths; not what runs have written, models and prepared rows, nor what is hidden."""
        own = {self.log_dir.resolve(), self.output_dir.resolve()}
        for root, folders, files in os.walk(self.data_dir):
            here = Path(root)
            if not OF_PROGRAMS.isdisjoint(files) and here != self.data_dir:
                folders.clear()
                continue
            folders[:] = [name for name in folders if not name.startswith(".") and (here / name).resolve() not in own]
            for path in (here / name for name in files if not name.startswith(".")):
                if path.suffix.lower() in DATA_SUFFIXES and path.is_file() and _is_inside(self.data_dir, path):
                    yield path


def checked_name(name: str) -> str:
    """A run's name as it came in, if it is one.

    Raises:
        Outside: it is not.
    """
    if problem := name_problem(name):
        raise Outside(say("{name!r} {problem}", name=shown_name(name), problem=problem))
    return name


def is_run_name(name: str) -> bool:
    """Whether the page can open a run of this name; the terminal may have made others."""
    return name_problem(name) is None


def inside(folder: Path, relative: str) -> Path:
    """A path below a folder, links followed.

    Raises:
        Outside: it lies elsewhere.
    """
    if not relative or "\0" in relative or "\\" in relative or Path(relative).is_absolute():
        raise Outside(say("{relative!r} is not a path inside {folder}", relative=relative[:80], folder=folder))
    path = folder / relative
    if ".." in Path(relative).parts or not _is_inside(folder, path):
        raise Outside(say("{relative!r} leads out of {folder}", relative=relative[:80], folder=folder))
    return path


def _is_inside(folder: Path, path: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False


def json_bytes(content: object, allow_nan: bool = True) -> bytes:
    """Content as JSON, messages in the user's language, whatever is in its texts: half of a surrogate pair, as of names that are not UTF-8, as an escape.

    Raises:
        ValueError: it holds numbers that JSON has not, and `allow_nan` is not set.
    """
    text = json.dumps(localized(content), ensure_ascii=False, allow_nan=allow_nan, separators=(",", ":"))
    return text.encode("utf8", "backslashreplace")
