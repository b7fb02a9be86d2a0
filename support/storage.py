"""Files and folders that are whole or not there, locks, digests, and reads of bounded size.

What is written gets its name only when all of it is on the disk: a temporary neighbour is filled, flushed and renamed,
and the folder that holds the name is flushed as well, since after a loss of power a rename may be on the disk and the
bytes not. No other file of the project renames or replaces.

Source: T. S. Pillai et al. 2014, "All File Systems Are Not Created Equal" (OSDI), section 3.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from zipfile import BadZipFile

from settings.errors import DoesNotFit, UserError, reason_of
from support.language import say
from support.screen import visible

if TYPE_CHECKING:
    from filelock import FileLock

TEMPORARY = ".tmp-"  # The name of what is being written begins with this.
REPLACED = ".old-"  # The name of a folder begins with this while another takes its place.
MOST_BYTES = 16 * 1024**2  # Configurations, states and the like are no larger.
MOST_TABLE_BYTES = 256 * 1024**2  # Tokenizers are no larger, nor tables that grow with what they describe.
PIECE_BYTES = 1024**2
NO_LOCKS = tuple(getattr(errno, name) for name in ("ENOSYS", "ENOLCK", "EOPNOTSUPP", "ENOTSUP") if hasattr(errno, name))


# --- writing ---


@contextmanager
def atomic_file(path: Path, is_synced: bool = True) -> Iterator[Path]:
    """A temporary path to fill, which replaces `path` when the context ends without an error.

    A link of that name is replaced, not written through.

    Args:
        is_synced: whether it is waited for until all of it is on the disk; not of what is written anew every moment.
    Raises:
        OSError: it cannot be written; the earlier file is whole.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    remove(temporary)
    try:
        yield temporary
        if is_synced:
            rename(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # Where it was a hard link to `path`, the rename has left both.


def write_text(path: Path, text: str, is_synced: bool = True) -> None:
    """Write a whole file in UTF-8; raises as `atomic_file`."""
    with atomic_file(path, is_synced) as temporary:
        temporary.write_text(text, encoding="utf8")


@contextmanager
def atomic_folder(path: Path, keeps_replaced: bool = False) -> Iterator[Path]:
    """An empty temporary folder to fill, which takes the place of `path`, and of a folder there, when the context ends
    without an error.

    Args:
        keeps_replaced: the folder that was there stays beside it, at `replaced_by`.
    Raises:
        OSError: it cannot be written; the earlier folder is whole, under its own name.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    replaced = replaced_by(path)
    clear_leftovers(path)
    make_folder(temporary)
    try:
        yield temporary
        sync(temporary)
        if os.path.lexists(path):
            os.replace(path, replaced)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        restore_folder(path)
        with suppress(OSError):  # What cannot be removed now, the next process removes as a leftover.
            remove(temporary)
            if not keeps_replaced:
                remove(replaced)


def replaced_by(path: Path) -> Path:
    """Where a folder waits for its removal while another takes its place."""
    return path.with_name(f"{REPLACED}{path.name}")


def restore_folder(path: Path) -> bool:
    """Give a folder its name back where its replacement was cut off between two renames; whether it was so."""
    with suppress(OSError):  # Where the rename fails, the folder lies there under the other name, whole.
        if os.path.lexists(replaced_by(path)) and not os.path.lexists(path):
            os.replace(replaced_by(path), path)
            return True
    return False


def clear_leftovers(path: Path) -> None:
    """Restore or remove what a process that was cut off while it wrote or replaced `path` has left beside it; raises
    OSError.
    """
    restore_folder(path)
    remove(replaced_by(path))
    remove(path.with_name(f"{TEMPORARY}{path.name}"))


def rename(source: Path, target: Path) -> None:
    """Rename a file or a folder over another, once all of it is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    sync(source)
    os.replace(source, target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder; nothing where there is none.

    A folder gets a temporary name first, so that none is ever found in part.
    """
    if path.is_dir() and not path.is_symlink():
        if not path.name.startswith(TEMPORARY):
            hidden = path.with_name(f"{TEMPORARY}{path.name.removeprefix(REPLACED)}")
            shutil.rmtree(hidden, ignore_errors=True)
            os.replace(path, hidden)
            sync_folder(path.parent)
            path = hidden
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it where they are missing, each with its name on the disk; raises OSError."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file, or all below a folder, is on the disk; a link is no more than its name. Raises OSError."""
    if path.is_symlink():
        return
    if not path.is_dir():
        return _sync(path, os.O_RDWR)
    for base, _, files in os.walk(path):
        for name in files:
            _sync(Path(base) / name, os.O_RDWR)
        sync_folder(Path(base))


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk; raises OSError."""
    if os.name != "nt":  # Windows cannot open folders.
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_full(error: BaseException) -> bool:
    """Whether a write failed since the disk, or the user's part of it, is full."""
    if not isinstance(error, OSError):
        return False
    # numpy gives no number, but says how much of an array it wrote: "4096 requested and 0 written".
    has_number = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
    return has_number or re.search("No space left| requested and .* written$", str(error)) is not None


@contextmanager
def writing(flag: str, folder: str | Path) -> Iterator[None]:
    """A context in which an OSError becomes a UserError that names the setting of the folder."""
    try:
        yield
    except OSError as error:
        reason = say("the disk is full") if is_full(error) else reason_of(error)
        raise UserError(
            "--{flag} = {folder}, cannot be written: {reason}; free space or choose another folder",
            flag=flag,
            folder=folder,
            reason=reason,
        ) from error


# --- locks ---


def lock_at(path: Path) -> FileLock | None:
    """A lock of the operating system on a file, not yet acquired, free again when its process ends.

    None where the file system has no locks (Lustre without `flock`, NFS without its lock service): a lock made of a
    file's existence would stay behind a killed process.

    Raises:
        OSError: the folder cannot be written.
    """
    from filelock import FileLock  # It is imported here so that a Python without it is still told so.

    lock = FileLock(path, thread_local=False)
    try:
        import fcntl
    except ImportError:  # Windows has locks of its own, on all file systems.
        return lock
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # A link makes no file elsewhere.
    try:
        fcntl.flock(handle, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    finally:
        os.close(handle)
    return lock


class InUse(Exception):
    """Another process holds a lock."""


@contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Hold the lock at a path until the context ends, or its process does; the file of the lock is removed at the end.

    Returns:
        whether this file system has locks; without them nothing is held.
    Raises:
        InUse: another process holds it. OSError: the folder cannot be written.
    """
    from filelock import Timeout

    lock = lock_at(path)
    if lock is None:
        yield False
    elif os.name == "nt":  # An open file cannot be removed there.
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InUse from None
        try:
            yield True
        finally:
            lock.release()
    else:
        handle = _locked_handle(path)
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)


def _locked_handle(path: Path) -> int:
    """An open file that holds the lock at a path; raises as `exclusive`."""
    import fcntl

    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        is_held = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file since it was opened: the lock of such a file protects nothing.
            with suppress(FileNotFoundError):
                is_held = os.path.samestat(os.fstat(handle), path.stat())
        except BlockingIOError:
            raise InUse from None
        finally:
            if not is_held:
                os.close(handle)
        if is_held:
            return handle


@contextmanager
def locked(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock at a path, where there are locks.

    Args:
        waiting: said on standard error when another process holds it, which is then waited for.
    Raises:
        OSError: the folder cannot be written.
    """
    from filelock import Timeout

    lock = lock_at(path)
    with ExitStack() as stack:
        if lock is not None:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                print(visible(waiting), file=sys.stderr, flush=True)
                lock.acquire()
            stack.callback(lock.release)
        yield


# --- work in parts ---


class OtherParts(Exception):
    """A folder holds finished parts of other work."""


class Parts:
    """Numbered files in a folder, each whole or not there: work that was cut off goes on with those that are missing.

    The manifest has a line for each finished part, written when the part is on the disk: what the work is made from,
    the part's number, size and digest, and facts that its maker wants to know again. A line that is torn or changed
    says nothing. A part counts if it is a plain file, not a link, of that size and digest; everything else in the
    folder is nobody's.

    Args:
        folder: is made with the first part. identity: of everything that the parts are made from. suffix: of their
            names.
    Raises:
        OtherParts: a part there is of another identity. OSError: the folder cannot be read.
    Memory: a line a part; time: one reading of all parts.
    """

    MANIFEST = "parts.jsonl"

    def __init__(self, folder: Path, identity: str, suffix: str = "") -> None:
        self.folder = folder
        self._identity = identity
        self._suffix = suffix
        self._entries: dict[int, dict[str, Any]] = {}
        for entry in self._read_manifest():
            if not self._is_sound(entry):
                self._entries.pop(entry["part"], None)
            elif entry["identity"] != identity:
                raise OtherParts(str(folder))
            else:
                self._entries[entry["part"]] = entry
        self._is_clean = False  # The manifest may hold other lines than those of these entries.

    def __contains__(self, part: int) -> bool:
        return part in self._entries

    def __iter__(self) -> Iterator[int]:
        """The numbers of finished parts, ascending."""
        return iter(sorted(self._entries))

    def path(self, part: int) -> Path:
        """Where a part is, or will be."""
        return self.folder / f"{part:08d}{self._suffix}"

    def facts(self, part: int) -> Any:
        """What was told of a finished part."""
        return self._entries[part]["facts"]

    @contextmanager
    def write(self, part: int, facts: Any = None) -> Iterator[Path]:
        """A temporary path to fill; when the context ends without an error the part is finished, and on the disk.

        Args:
            facts: JSON-able.
        Raises:
            OSError: it cannot be written; the other parts are whole.
        """
        make_folder(self.folder)
        path = self.path(part)
        if not self._is_clean:  # The manifest is written once, so that no torn line stays in front of the next.
            write_text(self.folder / self.MANIFEST, "".join(map(_manifest_line, self._entries.values())))
            self._is_clean = True
        if path.is_dir() and not path.is_symlink():
            remove(path)  # No file could take the place of a folder.
        with atomic_file(path) as temporary:
            yield temporary
            entry = {
                "identity": self._identity,
                "part": part,
                "bytes": temporary.stat().st_size,
                "sha256": digest(temporary),
                "facts": facts,
            }
        with (self.folder / self.MANIFEST).open("a", encoding="utf8") as file:
            file.write(_manifest_line(entry))
            file.flush()
            os.fsync(file.fileno())
        self._entries[part] = entry

    def remove(self) -> None:
        """Remove the folder, once the parts are of no use any more; raises OSError."""
        remove(self.folder)

    def _is_sound(self, entry: dict[str, Any]) -> bool:
        path = self.path(entry["part"])
        try:
            return is_plain(path) and path.stat().st_size == entry["bytes"] and digest(path) == entry["sha256"]
        except OSError:  # The part is made anew, which says what is wrong with the disk.
            return False

    def _read_manifest(self) -> Iterator[dict[str, Any]]:
        """The entries whose lines are whole, in their order."""
        path = self.folder / self.MANIFEST
        if not is_plain(path):
            return
        with path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(entry, dict) and _manifest_line(entry).encode() == line:
                    yield entry


def _manifest_line(entry: dict[str, Any]) -> str:
    """A line of a manifest, with a sum of the others of its values."""
    values = {name: value for name, value in entry.items() if name != "sum"}
    return json.dumps({**values, "sum": fingerprint(values)}) + "\n"


def is_plain(path: Path) -> bool:
    """Whether a path is a plain file: no link, folder, pipe or device, which a reader might wait for; raises
    nothing.
    """
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


# --- things made once ---


Once = Callable[..., Path]  # `make_once`, or `only_if_made` in its place
Value = TypeVar("Value")
# What libraries raise over a file that was cut, changed, or is another one.
DAMAGES = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    BadZipFile,
    zlib.error,
)
# Errors of the system that say that a file is another one than was written; libraries raise one without a number.
DAMAGE_ERRNOS = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.ELOOP)


class NotMade(Exception):
    """Something is not there yet, and making it was not asked for."""


def only_if_made(target: Path, make: Callable[[Path], None], resumable: bool = False, flag: str = "cache_dir") -> Path:
    """`make_once` where nothing shall be made; raises NotMade."""
    if not target.exists():
        raise NotMade(str(target))
    return target


def make_once(target: Path, make: Callable[[Path], None], resumable: bool = False, flag: str = "cache_dir") -> Path:
    """Make a file or folder unless it is there; processes that start together wait for the first.

    Args:
        target: its place; that it exists means that it is complete.
        make: fills the path that it is given, a neighbour of `target`.
        resumable: `make` can continue with what an interrupted attempt left at that path.
        flag: by which the user names another place.
    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    partial = target.with_name(target.name + ".partial")
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _made_by_one(target):
            if not target.exists():
                if not resumable:
                    remove(partial)
                try:
                    make(partial)
                    rename(partial, target)
                except BaseException as error:
                    # After an interrupt, a lack of memory or disk, or a read or write that failed, the same work may
                    # get further next time; what is wrong with the data or with the folder stays wrong.
                    causes = (error, error.__cause__, error.__context__)
                    may_pass = isinstance(error, (KeyboardInterrupt, DoesNotFit)) or any(
                        isinstance(cause, OSError) for cause in causes
                    )
                    if not (resumable and may_pass):
                        remove(partial)
                    raise
    except OSError as error:
        advice = say("name another folder with --{flag}", flag=flag)
        if not is_full(error):
            reason = say("it is a file") if isinstance(error, FileExistsError) else reason_of(error)
            problem = say(
                "{parent}: cannot be written ({reason}); {advice}", parent=target.parent, reason=reason, advice=advice
            )
        elif resumable and partial.exists():
            problem = say(
                "{parent}: the disk is full; what is done is kept in {partial}: free space and run the same command "
                "again, it continues from there; or delete that folder and {advice}",
                parent=target.parent,
                partial=partial,
                advice=advice,
            )
        else:
            problem = say("{parent}: the disk is full; free space or {advice}", parent=target.parent, advice=advice)
        raise UserError(problem) from error
    return target


def _made_by_one(target: Path) -> AbstractContextManager[None]:
    """A context in which no other process makes `target`; it waits for another that does, and says so."""
    waiting = say("another process is making {target}: waiting until it is done", target=target)
    return locked(target.with_name(target.name + ".lock"), waiting)


def read_once_made(
    target: Path,
    make: Callable[[Path], None],
    read: Callable[[Path], Value],
    once: Once = make_once,
    resumable: bool = False,
) -> Value:
    """What `read` finds in a file or folder of a cache, which is made anew where it is damaged, with a note.

    Args:
        target, make, resumable: as of `make_once`.
        read: raises UserError or any `DAMAGES` where it is not what `make` writes.
    Raises:
        UserError: as `make_once`; or it cannot be read, or what is damaged cannot be removed. NotMade: by
            `only_if_made`, also of what is damaged.
    """
    path = once(target, make, resumable)
    try:
        return read(path)
    except (UserError, *DAMAGES) as error:
        _refuse_unreadable(target, error)
        if once is only_if_made:
            raise NotMade(str(target)) from error
    remove_damaged(target, read)
    return read(once(target, make, resumable))


def remove_damaged(target: Path, read: Callable[[Path], object]) -> None:
    """Remove a file or folder of a cache that `read` refuses, with a note that it is made anew.

    Raises:
        UserError: it cannot be read, or cannot be removed.
    """
    try:
        with _made_by_one(target):
            try:
                read(target)
                return  # Another process that saw the damage has made it anew meanwhile.
            except (UserError, *DAMAGES) as error:
                _refuse_unreadable(target, error)
            remove(target)
    except OSError as unremoved:
        raise UserError(
            "{path}: is damaged and cannot be removed ({reason}); name another folder with --cache_dir",
            path=target,
            reason=reason_of(unremoved),
        ) from unremoved
    note = say("{path}: is damaged, it is made anew", path=target)
    print(visible(note), file=sys.stderr, flush=True)


def is_unreadable(error: BaseException) -> bool:
    """Whether a file could not be read, as without permission, which says nothing about its content."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno not in DAMAGE_ERRNOS:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _refuse_unreadable(target: Path, error: Exception) -> None:
    if is_unreadable(error):
        raise UserError(
            "{path}: cannot be read ({reason}); name another folder with --cache_dir",
            path=target,
            reason=reason_of(error),
        ) from error


def folder_bytes(folder: Path) -> int:
    """What the files of a folder take on the disk; a file that several hard links share counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # It was removed in between.
                facts = os.lstat(os.path.join(root, name))
                sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(sizes.values())


# --- digests ---


def fingerprint(value: Any) -> str:
    """16 hex digits of a JSON-able value, equal for equal values on every machine."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]


def digest(path: Path) -> str:
    """SHA-256 of a file in hex digits, as `sha256sum` prints it. Memory: 1 MiB."""
    sum_ = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            sum_.update(piece)
    return sum_.hexdigest()


# --- bounded reads: a foreign `config.json` may be a sparse file of terabytes, a device or a pipe ---


def open_plain(path: str | Path) -> BinaryIO:
    """A plain file, open to be read; raises OSError where it is none: a pipe that nobody writes to would be waited
    for.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a plain file")
    return open(path, "rb")


def read_bytes(path: str | Path, most: int = MOST_BYTES, may_wait: bool = False) -> bytes:
    """All bytes of a file.

    Args:
        may_wait: whether it may be a pipe, as a shell gives one for `<(...)`: the user has named it.
    Raises:
        OSError: it is not a plain file, cannot be read, or is larger than `most` bytes.
    """
    content = bytearray()
    with open(path, "rb") if may_wait else open_plain(path) as file:
        # Python asks malloc for all that a read allows, which `ulimit -v` may refuse: so a read allows little.
        while piece := file.read(PIECE_BYTES):
            content += piece
            if len(content) > most:
                raise OSError(
                    errno.EFBIG, say("is larger than {most} MiB, which no such file is", most=most // 1024**2)
                )
    return bytes(content)


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """All text of a file in UTF-8; raises as `read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path, most).decode("utf8").replace("\r\n", "\n")
