"""A file that is written in parts beside it until all are there, so that a second run goes on behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from commands.new_folder import check_output
from common.language import say
from common.storage import OtherParts, Parts, atomic_file, remove, writing
from settings.errors import UserError
from settings.fields import counted

UNFINISHED = ".unfinished"  # The ending of the folder with the parts.


class UnfinishedFile:
    """Parts of a file, each of some rows. A part that is damaged is made anew, and so are those behind it.

    Args:
        identity: of everything that the rows are made from.
        suffix: of the parts' names.
    Raises:
        UserError: the file is complete, was begun from something else, or cannot be written.
    """

    def __init__(self, path: Path, overwrite: bool, identity: str, suffix: str) -> None:
        self.path = path
        self.rows = 0  # In finished parts.
        self._count = 0
        self._folder = path.with_name(path.name + UNFINISHED)
        check_output(path, overwrite)
        with writing("output", self._folder):
            if overwrite or self._folder.is_file():  # Earlier versions have left a file there.
                remove(self._folder)
            try:
                self._parts = Parts(self._folder, identity, suffix)
            except OtherParts:
                raise UserError(
                    "--output = {path}, was begun with another model, input or settings; choose another file, or "
                    "begin anew with --overwrite=True",
                    path=path,
                ) from None
        while self._count in self._parts and self._parts.facts(self._count)[0] == self.rows:
            self.rows += self._parts.facts(self._count)[1]
            self._count += 1

    @property
    def paths(self) -> list[Path]:
        """The finished parts, in order."""
        return [self._parts.path(number) for number in range(self._count)]

    @contextmanager
    def next_part(self, rows: int) -> Iterator[Path]:
        """A path to fill with so many rows; they count once the context ends without an error."""
        with writing("output", self._folder), self._parts.write(self._count, [self.rows, rows]) as path:
            yield path
        self._count += 1
        self.rows += rows

    def finish(self, write: Callable[[Path], None]) -> None:
        """Make the file: where the path is a link, the one that it points to; what is no file, such as /dev/null, is
        written to.

        Args:
            write: fills it from `paths`.
        """
        path = self.path.resolve()
        with writing("output", path.parent):
            if path.exists() and not path.is_file():
                write(path)
            else:
                with atomic_file(path) as temporary:
                    write(temporary)
        with writing("output", self._folder):
            self._parts.remove()


@contextmanager
def tells_how_to_continue(output: UnfinishedFile | None) -> Iterator[None]:
    """A context in which Ctrl-C says that the same command goes on, where there is an output."""
    try:
        yield
    except KeyboardInterrupt:
        if output is None:
            raise
        text = say("interrupted; the same command continues after {rows}", rows=counted(output.rows, "row"))
        raise KeyboardInterrupt(text) from None
