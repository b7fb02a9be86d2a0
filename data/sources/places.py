"""Files on this machine, or at an address that `pyarrow.fs` opens (s3://, gs://, hdfs://, and hf:// by
huggingface_hub).

All kinds of place answer the same few questions (open, size, time of change, name), so that nothing else needs to know
which it is; lines that are typed are one too. Addresses are read as streams or in ranges, never fetched as a whole. Credentials come from where the
service's own tools keep them (environment, profile, instance); an endpoint may stand in the address, as in
`s3://bucket/key?endpoint_override=localhost:5000&scheme=http`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from settings.errors import UserError, reason_of
from settings.fields import at_home
from settings.program import needs
from support.language import say

# a name and a password, which may hold a slash (a name with a colon is no bucket), or in the query one of these
_SECRET = re.compile(
    r"(?<=://)(?:[^/@]*|[^/@:\s]*:[^\s@?#,\"']*)@|(?<=[?&])(?:access_key|secret_key|session_token)=[^&\s\"']*",
    re.IGNORECASE,
)


class State(NamedTuple):
    """Size and time of change of a remote file, under the names of `os.stat`."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class RemoteFile:
    """One file at an address.

    Args:
        uri: the address with its query; path: the file's path inside the file system.
    """

    uri: str
    path: str

    def __str__(self) -> str:
        return public(self.uri)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.path).suffixes

    def open(self, mode: str = "rb") -> pa.NativeFile:
        assert mode == "rb"
        with readable(str(self)):
            return _system(self.uri).open_input_file(self.path)

    def stat(self) -> State:
        """Ask for size and time of change; of the hub's files, which have none, for a number that changes with the
        content.
        """
        with readable(str(self)):
            system = _system(self.uri)
            if self.uri.startswith(HUB):
                facts = system.handler.fs.info(self.path)
                return State(int(facts["size"]), int(str(facts.get("blob_id") or "0")[:15], 16))
            info = system.get_file_info(self.path)
            return State(int(info.size or 0), int(info.mtime_ns or 0))

    def resolve(self) -> RemoteFile:
        """An address is absolute already."""
        return self


@dataclass(frozen=True)
class TypedLines:
    """Lines that a user has typed in place of a file's name, read like a file of text.

    Args:
        lines: none of them empty, without line ends.
    """

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join(self.lines)

    @property
    def name(self) -> str:
        return str(self)

    @property
    def suffixes(self) -> list[str]:
        return []

    def open(self, mode: str = "rb") -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO("\n".join(self.lines).encode())

    def stat(self) -> State:
        """Their size; they never change."""
        return State(len("\n".join(self.lines).encode()), 0)

    def resolve(self) -> TypedLines:
        """They are the same everywhere."""
        return self


Place = Path | RemoteFile | TypedLines
HUB = "hf://"
HUB_KINDS = ("datasets", "models", "spaces", "buckets")  # an address without one of these means a data set


def is_address(text: str) -> bool:
    """Whether a text is an address rather than a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None


def public(uri: str) -> str:
    """The address, or a text that holds it, without a user's name and password."""
    return _SECRET.sub("", uri)


def public_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as others may read them: no names and passwords in their addresses."""
    return {name: public(value) if isinstance(value, str) else value for name, value in values.items()}


def local_path(text: str) -> Path | None:
    """The path of a file or folder on this machine, which may be named as file:// address; None for other addresses."""
    if not is_address(text):
        return Path(at_home(text))
    parts = urlsplit(text)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def is_glob(address: str) -> bool:
    """Whether an address stands for all files that match it."""
    return re.search(r"^[^?]*[*\[]", address) is not None


def list_remote(uri: str, name: str) -> list[tuple[Place, PurePath]]:
    """Find the files of an address: itself, all below it if it is a folder, or those that match its `*`.

    Args:
        uri: may hold * and [..] in its path. name: the setting, for messages.
    Returns:
        files in the order of their paths, each with its path relative to the address (empty: the address itself).
    Raises:
        UserError: the address cannot be read.
    """
    if uri.lower().startswith(("http://", "https://")):
        raise UserError(
            "{name} = {uri}, is a page of the web, which is not read; fetch the file first, by curl or a browser",
            name=name,
            uri=public(uri),
        )
    from pyarrow import fs

    address, _, query = uri.partition("?")
    fixed = re.split(r"[*\[]", address, maxsplit=1)[0]
    base = fixed.rsplit("/", 1)[0] if is_glob(uri) else address.rstrip("/")
    with readable(f"{name} = {public(uri)}"):
        system, path = _opened(_with_query(base, query))
        info = system.get_file_info(path)
        if info.type == fs.FileType.File:
            return [(_remote(base, query, path, path), PurePosixPath())]
        if info.type == fs.FileType.NotFound:
            return []
        entries = system.get_file_info(fs.FileSelector(path, recursive=True))
    pattern = path + address[len(base) :]
    files = sorted(entry.path for entry in entries if entry.type == fs.FileType.File)
    if is_glob(uri):
        files = [file for file in files if fnmatchcase(file, pattern)]
    return [(_remote(base, query, path, file), PurePosixPath(file).relative_to(path)) for file in files]


def _remote(base: str, query: str, base_path: str, path: str) -> RemoteFile:
    return RemoteFile(_with_query(base + path[len(base_path) :], query), path)


def _with_query(address: str, query: str) -> str:
    return f"{address}?{query}" if query else address


def _opened(uri: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    from pyarrow import fs

    if not uri.startswith(HUB):
        system, path = fs.FileSystem.from_uri(uri)
        return system, str(path)
    hub = needs("huggingface_hub", uri)
    path = uri.removeprefix(HUB)
    kind = path.partition("/")[0]
    return fs.PyFileSystem(fs.FSSpecHandler(hub.HfFileSystem())), path if kind in HUB_KINDS else f"datasets/{path}"


@lru_cache(maxsize=8)
def _system_of(origin: str) -> Any:
    return _opened(origin)[0]


def _system(uri: str) -> Any:
    parts = urlsplit(uri)  # one connection for all files of a bucket
    return _system_of(_with_query(f"{parts.scheme}://{parts.netloc}/", parts.query))


@contextmanager
def readable(what: str, is_far: bool = True) -> Iterator[None]:
    """A context in which the complaint of a service, or of this machine, becomes one sentence."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if not is_far:
            if not isinstance(error, (pa.ArrowException, OSError)):
                raise
            raise UserError("{what}, cannot be read: {reason}", what=what, reason=reason_of(error)) from None
        # A service's client lets the errors of many libraries pass: of json where a mirror or a login answers with a
        # web page.
        reason = public(reason_of(error))
        if isinstance(error, (ValueError, LookupError, TypeError, AttributeError)):
            text = "the service's answer is not what its client expects, as a web page is not: {reason}"
            reason = say(text, reason=reason)
        raise UserError(
            "{what}, cannot be read ({reason}); check the address, the credentials and the network",
            what=what,
            reason=reason,
        ) from None
