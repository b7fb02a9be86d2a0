"""How do checkpoints outlive the machine, and reach one that has none? Copies at an address, such as s3://bucket/folder.

Each checkpoint is copied behind its saving; `LATEST`, a text file of one word, is written last, so that it names a whole
one whenever the machine dies. A run that is resumed on a machine without it, or with an older one, takes it from there.
The service is whatever `pyarrow.fs` opens; credentials come from where its own tools keep them.

    <checkpoint_mirror>/<run_name>/settings.json, run.json, LATEST, checkpoints/step_00000050/...
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from data.places import public
from settings import UserError
from training.checkpoints import TEMPORARY, Checkpoints, point, step_of
from training.runs import RUN_FILE, SETTINGS_FILE

LATEST, CHECKPOINTS = "LATEST", "checkpoints"


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
            self._system, path = fs.FileSystem.from_uri(uri)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{self.what}, cannot be opened ({reason}); write it as s3://bucket/folder, and see that it can be reached"
            ) from None
        self._path = f"{path.rstrip('/')}/{run_name}"

    def check(self) -> None:
        """Write and remove a small file.

        Raises:
            UserError: the address cannot be written.
        """
        try:
            self._system.create_dir(self._path, recursive=True)
            self._write("writable", b"")
            self._system.delete_file(f"{self._path}/writable")
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.what}, cannot be written ({_reason(error)}); check the address and the credentials"
            ) from None

    def push(self, run_dir: Path, checkpoint: Path) -> str | None:
        """Copy a checkpoint, and let go of those that the run has dropped.

        Returns:
            why it could not be done, for the log; the next checkpoint tries again.
        Memory: buffers of a few MB.
        """
        try:
            there = f"{self._path}/{CHECKPOINTS}/{checkpoint.name}"
            self._system.create_dir(there, recursive=True)
            fs.copy_files(str(checkpoint), there, fs.LocalFileSystem(), self._system)
            for name in (SETTINGS_FILE, RUN_FILE):
                self._write(name, (run_dir / name).read_bytes())
            self._write(LATEST, checkpoint.name.encode())
            kept = {path.name for path in (run_dir / CHECKPOINTS).glob("step_*")}
            for entry in self._system.get_file_info(fs.FileSelector(f"{self._path}/{CHECKPOINTS}")):
                if entry.base_name not in kept:
                    self._system.delete_dir(entry.path)
        except (pa.ArrowException, OSError) as error:
            return f"{self.what}, step {step_of(checkpoint)} could not be copied ({_reason(error)}); the next one tries again"
        return None

    def restore(self, run_dir: Path, keep_latest: int) -> Path | None:
        """Bring the latest copy where this machine has none, or an older one.

        Returns:
            the checkpoint brought; None: there is nothing newer.
        Raises:
            UserError: the address cannot be read, or the disk is full.
        """
        try:
            if self._system.get_file_info(f"{self._path}/{LATEST}").type == fs.FileType.NotFound:
                return None
            name = self._read(LATEST).decode()
            here = Checkpoints(run_dir, keep_latest).latest()
            if here is not None and here.name >= name:  # names are of equal length
                return None
            return self._bring(run_dir, name)
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.what}, cannot be restored ({_reason(error)}); check address, network and disk"
            ) from None

    def _bring(self, run_dir: Path, name: str) -> Path:
        folder = run_dir / CHECKPOINTS
        fresh, final = folder / f"{TEMPORARY}{name}", folder / name
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        fs.copy_files(f"{self._path}/{CHECKPOINTS}/{name}", str(fresh), self._system, fs.LocalFileSystem())
        os.replace(fresh, final)
        point(folder / "latest", final)
        for file in (SETTINGS_FILE, RUN_FILE):
            (run_dir / file).write_bytes(self._read(file))
        return final

    def _write(self, name: str, content: bytes) -> None:
        with self._system.open_output_stream(f"{self._path}/{name}") as stream:
            stream.write(content)

    def _read(self, name: str) -> bytes:
        with self._system.open_input_stream(f"{self._path}/{name}") as stream:
            return bytes(stream.read())


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
