"""How do checkpoints outlive the machine, and reach one that has none? Copies at an address, such as s3://bucket/folder.

Each checkpoint is copied after its saving, and the best one stays beside it; `LATEST`, a text file, is written last: the
folder of the latest, and that of the best. So it names whole ones whenever the machine dies. Nothing that it names is
written to again: another content of the same step goes into a folder of its own, `step_00000050.2`. A run that is resumed
on a machine without it, or with an older one, takes both from there, and compares their sums. A run is known by when it was
started (`run.json`): what another of the same name has copied there is neither continued nor, unasked, replaced.

What lies at the address may be anybody's: of all names there, only those that are written here are followed.
The service is whatever `pyarrow.fs` opens; credentials come from where its own tools keep them.

    <checkpoint_mirror>/<run_name>/settings.json, run.json, LATEST, checkpoints/step_00000050/...
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from data.sources.places import public
from model.formats.checksums import CHECKSUMS_FILE, damages, describe, is_inside
from settings.errors import UserError, reason_of
from storage import TEMPORARY, remove, sync, write_text
from training.checkpoints.folder import DAMAGED, Checkpoints, name_of, step_of
from training.checkpoints.runs import RUN_FILE, SETTINGS_FILE, read_run

LATEST, CHECKPOINTS = "LATEST", "checkpoints"
_FOLDER = re.compile(r"step_(\d{8,18})(\.\d{1,9})?")
_PIECE_BYTES = 2**20
_MOST_TEXT_BYTES = 2**24  # of settings, sums and the like


class Mirror:
    """The copies of one run.

    Args:
        uri: the folder of all runs at the service; `?query` may name an endpoint. run_name: of this one.
    Raises:
        UserError: the address is none.
    """

    def __init__(self, uri: str, run_name: str) -> None:
        self.what = f"--checkpoint_mirror = {public(uri)}"
        try:
            system, path = fs.FileSystem.from_uri(uri)
            self._system = _without_queue(system)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UserError(
                f"{self.what}, cannot be opened ({public(reason_of(error))}); write it as s3://bucket/folder (a space as %20), and see "
                "that it can be reached"
            ) from None
        self._path, self._is_made = f"{path.rstrip('/')}/{run_name}", False
        self.lacks: int | None = None  # the step of the run's last checkpoint, where no copy of it is there
        self._replaced: object = None  # when the run began whose copies this one may replace

    def check(self, run_dir: Path | None = None, overwrite: bool = False) -> None:
        """See that copies of a run can be made: nothing of another is there, and a small file can be written and removed.

        Args:
            run_dir: of a run that goes on; None: a new one. overwrite: whether it may replace another there.
        Raises:
            UserError: the address cannot be written, or holds another run of this name.
        """
        try:
            if not overwrite and self._named() and not (run_dir and self._is_of(run_dir)):
                raise UserError(
                    f"{self.what}, holds another run named {self._path.rpartition('/')[2]}; continue that with "
                    "--is_keep_training=True where this machine has none of the name, replace it with --overwrite=True, or "
                    "name this one otherwise"
                )
            self._replaced = self._record().get("started")
            self._system.create_dir(self._path, recursive=True)
            self._write("writable", b"")
            self._system.delete_file(f"{self._path}/writable")
            self._is_made = True
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.what}, cannot be written ({public(reason_of(error))}); check the address and the credentials"
            ) from None

    def is_at(self, run_dir: Path) -> bool:
        """Whether the copies would lie where the run itself is."""
        return isinstance(self._system, fs.LocalFileSystem) and Path(self._path).resolve() == run_dir.resolve()

    def _is_of(self, run_dir: Path) -> bool:
        """Whether what is there has been copied by the run of this folder."""
        return bool(self._record().get("started") == (read_run(run_dir) or {}).get("started"))

    # --- there ---

    def push(self, run_dir: Path, checkpoint: Path) -> str | None:
        """Copy a checkpoint, and the best where it is not there; remove those that the run has dropped.

        Returns:
            why it could not be done, for the log; the next checkpoint tries again.
        Memory: buffers of a few dozen MB.
        """
        self.lacks = step_of(checkpoint)
        try:
            if (taken := self._taken(run_dir, checkpoint)) is not None:
                return f"{self.what}, step {step_of(checkpoint)} was not copied: {taken}"
            # a place that is gone, such as a disk that was mounted there, is not made anew
            if self._is_made and isinstance(self._system, fs.LocalFileSystem) and not Path(self._path).is_dir():
                raise FileNotFoundError(f"{self._path} is no longer there")
            best, is_ours = Checkpoints(run_dir, keep_latest=1).best(), self._is_of(run_dir)
            known = [self._copied(best)] if best is not None else self._known_best(checkpoint) if is_ours else []
            named = [self._copied(checkpoint), *known]
            taken = self._taken(run_dir, checkpoint)  # while this was copied
            if taken is None and not all(map(self._holds, named[:1], [_sums_of(checkpoint)])):
                taken = "another process removes what this one copies; name one of the two runs otherwise"
            if taken is not None:
                return f"{self.what}, step {step_of(checkpoint)} was not copied: {taken}"
            if not is_ours and self._holds_file(LATEST):  # another's copies never stand beside our settings
                self._system.delete_file(f"{self._path}/{LATEST}")
            for name in (SETTINGS_FILE, RUN_FILE):
                self._replace(name, (run_dir / name).read_bytes())
            self._replace(LATEST, "\n".join(named).encode())
            self.lacks = None
        except (pa.ArrowException, OSError) as error:
            return f"{self.what}, step {step_of(checkpoint)} could not be copied ({public(reason_of(error))}); the next one tries again"
        try:
            self._forget(run_dir, named, is_ours)
        except (pa.ArrowException, OSError) as error:
            return f"{self.what}, copies that the run has dropped could not be removed ({public(reason_of(error))}); the next checkpoint tries again"
        return None

    def _taken(self, run_dir: Path, checkpoint: Path) -> str | None:
        """Why nothing may be copied: another run has come there since this one began, or this one is further elsewhere."""
        with suppress(UserError):  # what no run writes is written over
            names, started = self._named(), self._record().get("started")
            if names and not self._is_of(run_dir):
                is_other = started not in (None, self._replaced)
                return "another run of this name copies there by now; name one of them otherwise" if is_other else None
            if names and step_of(checkpoint.with_name(_plain(names[0]))) > _highest(run_dir):
                return (
                    f"it holds {names[0]} of this run, which this machine lacks: another machine has trained it further, or does; "
                    "stop one of them, and go on with --is_keep_training=True"
                )
        return None

    def _known_best(self, checkpoint: Path) -> list[str]:
        """The name of the best there, where the run knows of none."""
        with suppress(UserError):  # what was there before this run is written over
            return [
                name for name in self._named()[1:] if step_of(checkpoint.with_name(_plain(name))) <= step_of(checkpoint)
            ]
        return []

    def _copied(self, folder: Path) -> str:
        """The name there of a whole copy of this folder, which is made where there is none."""
        sums = _sums_of(folder)
        taken = [name for name in self._folders() if step_of(folder.with_name(_plain(name))) == step_of(folder)]
        for name in taken:
            if self._holds(name, sums):
                return name
        further = (f"{folder.name}.{number}" for number in count(2))
        fresh = next(name for name in chain([folder.name], further) if name not in taken)
        there = f"{self._path}/{CHECKPOINTS}/{fresh}"
        for name in _sizes(sums):
            self._system.create_dir(f"{there}/{name}".rpartition("/")[0], recursive=True)
        fs.copy_files(str(folder), there, fs.LocalFileSystem(), self._system)
        self._write(f"{CHECKPOINTS}/{fresh}/{CHECKSUMS_FILE}", sums)
        return fresh

    def _holds(self, name: str, sums: bytes) -> bool:
        sizes = _sizes(sums)
        there = f"{self._path}/{CHECKPOINTS}/{name}"
        infos = self._system.get_file_info([f"{there}/{file}" for file in (*sizes, CHECKSUMS_FILE)])
        if any(info.type != fs.FileType.File for info in infos):
            return False
        whole = all(info.size == size for info, size in zip(infos, sizes.values(), strict=False))
        return whole and self._read(f"{CHECKPOINTS}/{name}/{CHECKSUMS_FILE}") == sums

    def _forget(self, run_dir: Path, named: list[str], is_ours: bool) -> None:
        kept = {path.name for path in (run_dir / CHECKPOINTS).glob("step_*")}
        if is_ours:  # what is further may be on its way from another machine
            kept |= {name for name in map(_plain, self._folders()) if step_of(run_dir / name) > _highest(run_dir)}
        outdated = {_plain(name) for name in named}  # of these steps, the copies that are named are the ones
        for name in self._folders():
            if name not in named and (_plain(name) not in kept or _plain(name) in outdated):
                self._system.delete_dir(f"{self._path}/{CHECKPOINTS}/{name}")

    def _folders(self) -> list[str]:
        """Names of the checkpoints there, ours alone."""
        found = self._system.get_file_info(fs.FileSelector(f"{self._path}/{CHECKPOINTS}", allow_not_found=True))
        return [entry.base_name for entry in found if _FOLDER.fullmatch(entry.base_name)]

    # --- back ---

    def restore(self, run_dir: Path, keep_latest: int) -> Path | None:
        """Bring the latest copy and the best where this machine has none, or an older one.

        Returns:
            the checkpoint brought, as it is there: where it is damaged and another is not, `Checkpoints.intact` tells and
            takes that; None: there is nothing newer of this run.
        Raises:
            UserError: the address cannot be read, holds what no run writes, or the disk is full.
        """
        is_new, is_whole = False, False
        try:
            names, begun = self._named(), read_run(run_dir)
            if not names or (begun is not None and not self._is_of(run_dir)):
                return None
            here, is_new = Checkpoints(run_dir, keep_latest), not run_dir.exists()
            newest = here.whole()
            if newest is not None and step_of(newest) >= step_of(run_dir / _plain(names[0])):
                return None
            self._bring_settings(run_dir, begun is None)
            here.folder.mkdir(exist_ok=True)
            here.clear_leftovers()
            # the latest last: from then on the run is where it was
            damaged = {name: found for name in dict.fromkeys(reversed(names)) if (found := self._bring(here, name))}
            if len(damaged) == len(set(names)) and here.whole() is None:
                told = "; ".join(f"the copy {name} is damaged: {', '.join(found)}" for name, found in damaged.items())
                raise UserError(f"{self.what}, {told}; name another place")
            here.point()
            is_whole = True
            return here.folder / _plain(names[0])
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{self.what}, cannot be restored ({public(reason_of(error))}); check address, network and disk"
            ) from None
        finally:
            if is_new and not is_whole:  # else a start without the mirror would take it for a run that has just begun
                remove(run_dir)

    def record(self) -> dict[str, Any]:
        """What `run.json` says there; empty where there is none.

        Raises:
            UserError: the address cannot be read.
        """
        try:
            return self._record()
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.what}, cannot be read ({public(reason_of(error))}); check address and network"
            ) from None

    def _record(self) -> dict[str, Any]:
        if not self._holds_file(RUN_FILE):
            return {}
        try:
            content = json.loads(self._read(RUN_FILE))
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _holds_file(self, name: str) -> bool:
        return bool(self._system.get_file_info(f"{self._path}/{name}").type != fs.FileType.NotFound)

    def _named(self) -> list[str]:
        """The names in LATEST: of the latest, and of the best if there is one; none before the first copy."""
        if not self._holds_file(LATEST):
            return []
        names = self._read(LATEST).decode(errors="replace").split("\n")
        if not 1 <= len(names) <= 2 or not all(_FOLDER.fullmatch(name) for name in names):
            raise self._foreign(f"{LATEST} holds {str(names)[:100]}")
        return names

    def _bring_settings(self, run_dir: Path, with_record: bool) -> None:
        """Take over how the run is set there, and what it is where this machine does not know; nothing that no run writes."""
        found = {file: self._read(file).decode() for file in (SETTINGS_FILE, *([RUN_FILE] if with_record else []))}
        for file, text in found.items():
            with suppress(ValueError, RecursionError):
                if isinstance(json.loads(text), dict):
                    continue
            raise self._foreign(f"{file} is damaged")
        run_dir.mkdir(parents=True, exist_ok=True)
        for file, text in found.items():
            write_text(run_dir / file, text)

    def _bring(self, here: Checkpoints, name: str) -> list[str]:
        """Fetch one checkpoint, compare its sums, and give it its name; returns what is damaged in the copy."""
        final = here.folder / _plain(name)
        if self._is_here(final, name):
            return []
        fresh = final.with_name(f"{TEMPORARY}{final.name}")
        for file, path in self._files(name):
            (fresh / file).parent.mkdir(parents=True, exist_ok=True)
            with self._system.open_input_stream(path) as source, (fresh / file).open("xb") as target:
                while piece := source.read(_PIECE_BYTES):
                    target.write(piece)
        if not fresh.is_dir():
            raise self._foreign(f"{LATEST} names {name}, which is not there")
        # a damaged copy is shown to `Checkpoints.intact`, which tells of it, where another is whole and nothing makes way for it
        if not (found := damages(fresh)) or (here.whole() is not None and not final.exists()):
            sync(fresh)
            here.put_in_place(fresh, final)
        else:
            remove(fresh)
        return found

    def _is_here(self, final: Path, name: str) -> bool:
        sums = f"{CHECKPOINTS}/{name}/{CHECKSUMS_FILE}"
        if not (final / CHECKSUMS_FILE).is_file() or damages(final):
            return False
        there = self._system.get_file_info(f"{self._path}/{sums}").type == fs.FileType.File
        return there and self._read(sums) == (final / CHECKSUMS_FILE).read_bytes()

    def _files(self, name: str) -> Iterator[tuple[str, str]]:
        """Files of one checkpoint there: name inside it, path at the service."""
        there = f"{self._path}/{CHECKPOINTS}/{name}"
        for entry in self._system.get_file_info(fs.FileSelector(there, allow_not_found=True, recursive=True)):
            file = entry.path[len(there) :].lstrip("/") if entry.path.startswith(there) else ""
            if entry.type == fs.FileType.File and not is_inside(file):
                raise self._foreign(f"{name} holds {entry.path[-100:]}")
            if entry.type == fs.FileType.File:
                yield file, entry.path

    def _foreign(self, what: str) -> UserError:
        return UserError(f"{self.what}, {what}, which no run writes; name the address of your own runs")

    def _write(self, name: str, content: bytes) -> None:
        with self._system.open_output_stream(f"{self._path}/{name}") as stream:
            stream.write(content)

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file whose old content counts until the new one is whole: a plain file system truncates it first."""
        fresh = f"{name}.new"
        self._write(fresh, content)
        self._system.move(f"{self._path}/{fresh}", f"{self._path}/{name}")

    def _read(self, name: str) -> bytes:
        with self._system.open_input_stream(f"{self._path}/{name}") as stream:
            return bytes(stream.read(_MOST_TEXT_BYTES))


def _plain(name: str) -> str:
    """The checkpoint's own name: `step_00000050` of `step_00000050.2`."""
    match = _FOLDER.fullmatch(name)
    assert match is not None
    return name_of(int(match.group(1)))


def _highest(run_dir: Path) -> int:
    """The highest step of which this machine has a checkpoint, or had one that was damaged."""
    names = (path.name.removeprefix(DAMAGED) for path in (run_dir / CHECKPOINTS).glob("*step_*"))
    return max((step_of(run_dir / name) for name in names if _FOLDER.fullmatch(name)), default=-1)


def _sums_of(folder: Path) -> bytes:
    """What `checksums.json` says of a checkpoint, or would."""
    sums = folder / CHECKSUMS_FILE
    return sums.read_bytes() if sums.is_file() else json.dumps({"files": describe(folder)}).encode()


def _sizes(sums: bytes) -> dict[str, int]:
    """File -> bytes, of those sums."""
    return {name: entry["bytes"] for name, entry in json.loads(sums)["files"].items()}


def _without_queue(system: fs.FileSystem) -> fs.FileSystem:
    """The same system, writing no faster than the line: S3's would queue a whole checkpoint in memory."""
    if not isinstance(system, fs.S3FileSystem):
        return system
    _, (options, *_) = system.__reduce__()
    return fs.S3FileSystem(**{**options, "background_writes": False})
