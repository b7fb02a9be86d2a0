"""Copies of a run's checkpoints at an address, such as s3://bucket/folder, for when its machine is lost.

Each checkpoint is copied after its saving, and the best one stays beside it; `LATEST`, a text file, is written last and names
the folders of both, so it names whole ones whenever the machine dies. A run that is resumed on a machine without it, or with an
older one, is brought from there. Runs of one name are told apart by when they began (`run.json`).

What lies at the address may be anybody's: only names that are written here are followed, and of a checkpoint only the files
that its sums name are copied. The service is whatever `pyarrow.fs` opens; credentials come from where its own tools keep them.

    <checkpoint_mirror>/<run_name>/settings.json, run.json, LATEST, checkpoints/step_00000050/...
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from data.sources.places import public
from language import join, say
from model.formats.checksums import CHECKSUMS_FILE, damages, read_sums, seal
from run_files import RUN_FILE, SETTINGS_FILE
from settings.errors import UserError, reason_of
from storage import atomic_folder, write_text
from training.checkpoints.folder import Checkpoints, step_of
from training.checkpoints.runs import read_run

LATEST, CHECKPOINTS = "LATEST", "checkpoints"
_FOLDER = re.compile(r"(step_\d{8,18})(\.\d{1,9})?")  # version 0.2 numbered copies of one step
_MOST_TEXT_BYTES = 2**24  # of settings, records and LATEST
_FAILURES = (pa.ArrowException, OSError)


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
        except (*_FAILURES, ValueError) as error:
            raise UserError(
                "{mirror}, cannot be opened ({reason}); write it as s3://bucket/folder (a space as %20), and see "
                "that it can be reached",
                mirror=self.what,
                reason=public(reason_of(error)),
            ) from None
        if isinstance(system, fs.S3FileSystem):  # it would queue a whole checkpoint in memory where the line is slow
            _, (options, *_) = system.__reduce__()
            system = fs.S3FileSystem(**{**options, "background_writes": False})
        self._system, self._path, self._is_checked = system, f"{path.rstrip('/')}/{run_name}", False
        self.uncopied_step: int | None = None  # of the run's last checkpoint, if no copy of it is there
        self._replaced: object = None  # when the run began whose copies this one may replace

    def check(self, run_dir: Path | None = None, overwrite: bool = False) -> None:
        """See that copies of a run can be made: nothing of another is there, and a small file can be written and removed.

        Args:
            run_dir: of a run that is resumed; None: a new one. overwrite: whether it may replace another there.
        Raises:
            UserError: the address cannot be written, or holds another run of this name.
        """
        with self._reaching("written", "check the address and the credentials"):
            if not overwrite and self._names() and not (run_dir and self._is_of(run_dir)):
                raise UserError(
                    "{mirror}, holds another run named {name}; continue that with --is_keep_training=True where this machine "
                    "has none of the name, replace it with --overwrite=True, or name this one otherwise",
                    mirror=self.what,
                    name=self._path.rpartition("/")[2],
                )
            self._replaced = self._record().get("started")
            self._system.create_dir(self._path, recursive=True)
            self._write("writable", b"")
            self._system.delete_file(f"{self._path}/writable")
            self._is_checked = True

    def is_at(self, run_dir: Path) -> bool:
        """Whether the copies would lie where the run itself is."""
        return isinstance(self._system, fs.LocalFileSystem) and Path(self._path).resolve() == run_dir.resolve()

    def push(self, run_dir: Path, checkpoint: Path) -> str | None:
        """Copy a checkpoint, and the best where it is not there; remove those that the run has removed.

        Returns:
            why it could not be done, for the log; the next checkpoint tries again.
        Memory: buffers of a few dozen MB.
        """
        self.uncopied_step = step_of(checkpoint)
        failed = say("{mirror}, step {step} could not be copied", mirror=self.what, step=self.uncopied_step)
        try:
            # a place that is gone, such as a disk that was mounted there, is not made anew
            if self._is_checked and isinstance(self._system, fs.LocalFileSystem) and not Path(self._path).is_dir():
                raise FileNotFoundError(say("{path} is no longer there", path=self._path))
            is_ours = self._is_of(run_dir)
            if not is_ours and self._has(LATEST):
                if self._record().get("started") not in (None, self._replaced):
                    return say(
                        "{failed}: another run of this name copies there by now; rename one of them", failed=failed
                    )
                self._system.delete_file(f"{self._path}/{LATEST}")  # another's copies never stand beside our settings
            best = Checkpoints(run_dir, keep_latest=1).best()
            named = [checkpoint.name, *([best.name] if best else [])]
            for folder in (checkpoint, *([best] if best else [])):
                self._copy(folder)
            for name in (SETTINGS_FILE, RUN_FILE):
                self._replace(name, (run_dir / name).read_bytes())
            self._replace(LATEST, "\n".join(named).encode())
            self.uncopied_step = None
            kept = {*named, *(path.name for path in (run_dir / CHECKPOINTS).glob("step_*"))}
            there = fs.FileSelector(f"{self._path}/{CHECKPOINTS}")
            for entry in self._system.get_file_info(there):
                if _FOLDER.fullmatch(entry.base_name) and entry.base_name not in kept:
                    self._system.delete_dir(entry.path)
        except _FAILURES as error:
            reason = public(reason_of(error))
            if self.uncopied_step is None:
                return say(
                    "{mirror}, copies that the run has removed could not be removed ({reason}); the next checkpoint tries again",
                    mirror=self.what,
                    reason=reason,
                )
            return say("{failed} ({reason}); the next one tries again", failed=failed, reason=reason)
        return None

    def restore(self, run_dir: Path, keep_latest: int) -> Path | None:
        """Bring the latest copy and the best where this machine has no checkpoint, or an older one.

        Returns:
            the latest, as it is there: where it is damaged and the best is not, `Checkpoints.intact` warns and takes that;
            None: there is nothing newer of this run.
        Raises:
            UserError: the address cannot be read, holds what no run writes, or the disk is full.
        """
        with self._reaching("restored", "check address, network and disk"):
            names, here = self._names(), read_run(run_dir)
            if not names or (here is not None and not self._is_of(run_dir)):
                return None
            newest, latest = Checkpoints(run_dir, keep_latest).whole(), run_dir / CHECKPOINTS / _plain(names[0])
            if newest is not None and step_of(newest) >= step_of(latest):
                return None
            if run_dir.exists():
                self._bring(Checkpoints(run_dir, keep_latest), names, here is None)
            else:
                with atomic_folder(run_dir) as fresh:
                    self._bring(Checkpoints(fresh, keep_latest), names, True)
            return latest

    def record(self) -> dict[str, Any]:
        """What `run.json` says there; empty where there is none."""
        with self._reaching("read", "check address and network"):
            return self._record()

    @contextmanager
    def _reaching(self, done: str, advice: str) -> Iterator[None]:
        try:
            yield
        except (*_FAILURES, UnicodeDecodeError) as error:
            raise UserError(
                "{mirror}, cannot be {done} ({reason}); {advice}",
                mirror=self.what,
                done=say(done),
                reason=public(reason_of(error)),
                advice=say(advice),
            ) from None

    def _record(self) -> dict[str, Any]:
        try:
            content = json.loads(self._read(RUN_FILE)) if self._has(RUN_FILE) else {}
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _is_of(self, run_dir: Path) -> bool:
        """Whether what is there has been copied by the run of this folder."""
        return bool(self._record().get("started") == (read_run(run_dir) or {}).get("started"))

    def _names(self) -> list[str]:
        """The folders in LATEST: of the latest, and of the best if there is one; none before the first copy."""
        if not self._has(LATEST):
            return []
        names = self._read(LATEST).decode(errors="replace").split("\n")
        if not 1 <= len(names) <= 2 or not all(map(_FOLDER.fullmatch, names)):
            raise self._foreign(say("{file} holds {content}", file=LATEST, content=str(names)[:100]))
        return names

    def _copy(self, checkpoint: Path) -> None:
        """Copy a checkpoint unless it is there; a folder of other content is one that was cut off, or of another run."""
        if not (checkpoint / CHECKSUMS_FILE).is_file():  # the best of a run that version 0.1 began
            seal(checkpoint)
        there, sums = f"{self._path}/{CHECKPOINTS}/{checkpoint.name}", (checkpoint / CHECKSUMS_FILE).read_bytes()
        name = f"{CHECKPOINTS}/{checkpoint.name}/{CHECKSUMS_FILE}"
        if self._has(name) and self._read(name) == sums:
            return
        if self._has(f"{CHECKPOINTS}/{checkpoint.name}"):
            self._system.delete_dir(there)
        for file in json.loads(sums)["files"]:
            self._system.create_dir(f"{there}/{file}".rpartition("/")[0], recursive=True)
            fs.copy_files(str(checkpoint / file), f"{there}/{file}", fs.LocalFileSystem(), self._system)
        self._write(name, sums)

    def _bring(self, checkpoints: Checkpoints, names: list[str], with_record: bool) -> None:
        """Take over how the run is set there, and what it is where this machine does not know; then its checkpoints."""
        found = {file: self._read(file).decode() for file in (SETTINGS_FILE, *([RUN_FILE] if with_record else []))}
        for file, text in found.items():
            with suppress(ValueError, RecursionError):
                if isinstance(json.loads(text), dict):
                    continue
            raise self._foreign(say("{file} is damaged", file=file))
        for file, text in found.items():
            write_text(checkpoints.folder.parent / file, text)
        for name in reversed(names):  # the latest last: from then on the run is where it was
            final = checkpoints.folder / _plain(name)
            if not (final / CHECKSUMS_FILE).is_file() or damages(final):
                self._fetch(name, final)
        if checkpoints.whole() is None:
            raise UserError(
                "{mirror}, its copies are damaged: {names}; choose another place",
                mirror=self.what,
                names=join(", ", names),
            )
        checkpoints.finish_last_save()

    def _fetch(self, name: str, final: Path) -> None:
        there = f"{CHECKPOINTS}/{name}"
        if not self._has(f"{there}/{CHECKSUMS_FILE}"):
            raise self._foreign(say("{file} names {name}, which is not there", file=LATEST, name=name))
        with atomic_folder(final) as fresh:
            (fresh / CHECKSUMS_FILE).write_bytes(self._read(f"{there}/{CHECKSUMS_FILE}"))
            for file in (read_sums(fresh) or {})["files"]:  # none leads out of the folder
                (fresh / file).parent.mkdir(parents=True, exist_ok=True)
                source = f"{self._path}/{there}/{file}"
                with suppress(FileNotFoundError):  # its sum is missed
                    fs.copy_files(source, str(fresh / file), self._system, fs.LocalFileSystem())

    def _foreign(self, what: str) -> UserError:
        return UserError(
            "{mirror}, {what}, which no run writes; give the address of your own runs", mirror=self.what, what=what
        )

    def _has(self, name: str) -> bool:
        return bool(self._system.get_file_info(f"{self._path}/{name}").type != fs.FileType.NotFound)

    def _read(self, name: str) -> bytes:
        with self._system.open_input_stream(f"{self._path}/{name}") as stream:
            return bytes(stream.read(_MOST_TEXT_BYTES))

    def _write(self, name: str, content: bytes) -> None:
        with self._system.open_output_stream(f"{self._path}/{name}") as stream:
            stream.write(content)

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file whose old content counts until the new one is whole: a plain file system truncates it first."""
        self._write(f"{name}.new", content)
        self._system.move(f"{self._path}/{name}.new", f"{self._path}/{name}")


def _plain(name: str) -> str:
    """The checkpoint's own name: `step_00000050` of `step_00000050.2`."""
    return name.partition(".")[0]
