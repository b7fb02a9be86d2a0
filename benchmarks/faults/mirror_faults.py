"""A mirror that fails at each of a run's changes to it: `benchmarks.faults.disk_faults` for a `pyarrow.fs` service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyarrow import fs

Around = Callable[..., Any]  # (name, plain, *arguments)


class CountedFiles(fs.FileSystemHandler):
    """A service whose changes pass through `around(name, plain, *arguments)`."""

    def __init__(self, plain: fs.FileSystem, around: Around) -> None:
        self._plain, self._around = plain, around

    def get_type_name(self) -> str:
        return "counted"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return list(self._plain.get_file_info(paths))

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        return list(self._plain.get_file_info(selector))

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self._plain.open_input_stream(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        return self._plain.open_input_file(path)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._around("create_dir", lambda where: self._plain.create_dir(where, recursive=recursive), path)

    def delete_dir(self, path: str) -> None:
        self._around("delete_dir", self._plain.delete_dir, path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._around("delete_dir_contents", self._plain.delete_dir_contents, path)

    def delete_root_dir_contents(self) -> None:
        self._around("delete_root_dir_contents", lambda where: self._plain.delete_dir_contents(where), "/")

    def delete_file(self, path: str) -> None:
        self._around("delete_file", self._plain.delete_file, path)

    def move(self, source: str, target: str) -> None:
        self._around("move", self._plain.move, source, target)

    def copy_file(self, source: str, target: str) -> None:
        self._around("copy_file", self._plain.copy_file, source, target)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        stream = self._around("open", self._plain.open_output_stream, path)
        return pa.PythonFile(_CountedStream(stream, path, self._around), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return self._plain.open_append_stream(path)


class _CountedStream:
    """A file that is being written there."""

    def __init__(self, plain: pa.NativeFile, path: str, around: Around) -> None:
        self._plain, self._path, self._around = plain, path, around

    @property
    def closed(self) -> bool:
        return bool(self._plain.closed)

    def write(self, content: bytes) -> int:
        self._around("write", lambda where: self._plain.write(content), self._path)
        return len(content)

    def flush(self) -> None:
        self._plain.flush()

    def close(self) -> None:
        if not self._plain.closed:
            self._around("close", lambda where: self._plain.close(), self._path)


def watch_mirrors(around: Around) -> None:
    """Let every change at any mirror of this process pass through `around`."""
    from training.checkpoints.mirror import Mirror

    plain = Mirror.__init__

    def init(self: Mirror, uri: str, run_name: str) -> None:
        plain(self, uri, run_name)
        self._system = fs.PyFileSystem(CountedFiles(self._system, around))

    Mirror.__init__ = init  # type: ignore[method-assign]
