"""What `generate`, `embed`, `search` and `rerank` share: texts of a file, of standard input or of a flag go through a
model, part by part.

A part is on the disk before the next begins, so that a command that was killed goes on behind its last part. When all
are there, they become one file.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, Generic, TextIO, TypeVar

from commands.answering import Answering
from commands.new_folder import check_output
from data.sources.files import find, sources_fingerprint
from data.sources.formats import KIND_BY_SUFFIX
from data.sources.lines import BadRows
from data.sources.prompts import PROMPT, Prompt, prompts_in_child
from data.sources.source import Source
from memory.monitor import watched
from settings.declared import DataConfig
from settings.errors import UserError
from settings.fields import counted
from support.language import say
from support.storage import OtherParts, Parts, atomic_file, fingerprint, remove, writing
from training.loaded_model import LoadedModel, note
from training.report.progress import Progress
from training.saved_model import SavedModel

STANDARD_INPUT = "-"
TYPED = "--input"  # The place of a prompt that is the flag's own text: its answer keeps its line ends on the screen.
UNFINISHED = ".unfinished"  # The ending of the folder with the parts.
Row = TypeVar("Row")


class TextWork(Generic[Row]):
    """What a command makes of texts: answers, labels or vectors.

    Args:
        answering: the model, which `load` loads.
        columns: in which texts are looked for, first choice first.
    """

    batch_flag = "generate_batch_size"
    keeps: Sequence[str] | None  # Columns of the input that a row is made of; None: all.
    part_suffix: str
    version: int  # Raise it when the same texts would give other rows.

    def __init__(self, answering: Answering, columns: Sequence[DataConfig]) -> None:
        self.config = answering.config
        self.answering = answering
        self.columns = columns
        self.trained: LoadedModel

    def load(self, reads_files: bool = False) -> dict[str, int]:
        """Load the model; returns what the least work with it takes: component -> bytes."""
        raise NotImplementedError

    def read(self, sources: Sequence[Source], bad_rows: BadRows, max_bytes: int) -> Iterator[Any]:
        """The rows of files, read in a child that may hold so many bytes; they are what `parts` takes."""
        return prompts_in_child(sources, self.columns, bad_rows, max_bytes, self.keeps)

    def identity(self) -> list[Any]:
        """Everything but model and input that shapes the rows."""
        raise NotImplementedError

    def parts(self, prompts: Iterator[Any], rows_done: int = 0) -> Iterator[list[Row]]:
        """Rows of prompts, in their order, without the first ones.

        Memory: one part, and its prompts.
        """
        raise NotImplementedError

    def show(self, part: list[Row]) -> None:
        """Print rows on standard output."""
        raise NotImplementedError

    def write(self, part: list[Row], path: Path) -> None:
        """Write rows to a file of their own."""
        raise NotImplementedError

    def join(self, parts: Sequence[Path], rows: int, path: Path) -> None:
        """Make one file of those that `write` has written."""
        raise NotImplementedError

    def notes(self, output: UnfinishedFile | None, bad_rows: BadRows) -> list[str]:
        """What the user should know in the end."""
        raise NotImplementedError


def run(work: TextWork[Any]) -> None:
    """Do the work of `--input` into `--output`, or onto the screen, and say on standard error or beside the output what
    came of it.

    Raises:
        UserError: input or output are not usable. DoesNotFit: the budget does not hold the least work.
    """
    config = work.config
    source = str(config.answer.input)
    bad_rows = BadRows(config.data.skip_bad_rows)
    reads_files = check_input(source)
    output = None
    if config.answer.output is not None:
        path = Path(config.answer.output)
        if reads_files:
            check_is_not_read(path, find(source, "--input"))
        output = UnfinishedFile(path, config.run.overwrite, fingerprint_of(work), work.part_suffix)
    least_parts = work.load(reads_files)
    trained = work.trained
    if reads_files:
        max_bytes = trained.reserve_reading(least_parts)
        prompts = work.read(find(source, "--input"), bad_rows, max_bytes)
    elif source == STANDARD_INPUT:
        prompts = _typed_lines(sys.stdin, bad_rows)
    else:
        prompts = iter([Prompt(TYPED, source, {PROMPT: source})])
    dtypes = (trained.blockwise.model.embedding.dtype, trained.blockwise.weight_store.compute_dtype)
    storage, compute = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    text = "{model}: weights in {storage}, computed in {compute}"
    note(say(text, model=trained.folder, storage=storage, compute=compute))
    screen = Progress(1, stream=sys.stderr if output is None else sys.stdout)
    if output is not None and output.rows:
        text = "{file}: {rows} already done; continuing after them"
        screen.note(say(text, file=output.path, rows=counted(output.rows, "row")))
    with watched(trained.monitor, f"--{work.batch_flag}=1"):
        with _tells_how_to_continue(output):
            for part in work.parts(prompts, 0 if output is None else output.rows):
                if output is None:
                    work.show(part)
                else:
                    with output.next_part(len(part)) as path:
                        work.write(part, path)
            if output is not None:
                parts = output.paths
                output.finish(lambda file: work.join(parts, output.rows, file))
        for text in work.notes(output, bad_rows):
            screen.note(text)


def fingerprint_of(work: TextWork[Any]) -> str:
    """16 hex digits of everything that the rows of a work are made from."""
    source = str(work.config.answer.input)
    return fingerprint([work.version, *_marks(work.answering.model, source), *work.identity()])


def join_files(parts: Sequence[Path], path: Path) -> None:
    """Write files one behind the other into another one."""
    with path.open("wb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)


def in_parts(
    rows: Iterable[Row], most_rows: int, most_bytes: int, num_bytes: Callable[[Row], int]
) -> Iterator[list[Row]]:
    """Consecutive rows in lists, each of which ends with so many rows, or with the row that brings so many bytes."""
    part = list[Row]()
    size = 0
    for row in rows:
        part.append(row)
        size += num_bytes(row)
        if len(part) == most_rows or size >= most_bytes:
            yield part
            part = []
            size = 0
    if part:
        yield part


def check_input(source: str) -> bool:
    """Whether the input names files; else it is a text or stands for standard input.

    Raises:
        UserError: it can only be meant as a file, and there is none.
    """
    with suppress(OSError, ValueError):  # A long text is no path.
        if source != STANDARD_INPUT and os.path.exists(source):
            return bool(find(source, "--input"))
    # One word with the ending of a file can only be meant as one.
    if len(source.split()) == 1 and PurePath(source.strip()).suffix.lower() in KIND_BY_SUFFIX:
        raise UserError(
            say('--input = {given}, no such file; give a file that exists, or a text (--input="Hello")', given=source)
        )
    return False


def check_is_not_read(output: Path, sources: Sequence[Source]) -> None:
    """Raises UserError if the output is one of the files that are read."""
    paths = [source.path for source in sources if isinstance(source.path, Path)]
    if output.exists() and any(path.samefile(output) for path in paths):
        raise UserError(say("--output = {path}, is a file that is read; choose another one", path=output))


def _typed_lines(lines: TextIO, bad_rows: BadRows) -> Iterator[Prompt]:
    """A prompt a line, as they come."""
    try:
        for number, line in enumerate(lines, 1):
            line.encode("utf8")  # In the locale C, bytes that are not UTF-8 come as halves of surrogate pairs.
            text = line.strip()
            line_name = say("line {number}", number=number)
            if not text:
                bad_rows.note(say("standard input"), line_name, say("is empty"))
            yield Prompt(say("standard input, {place}", place=line_name), text, {PROMPT: text})
    except UnicodeError:
        raise UserError(say("standard input, is not UTF-8; convert it, or set LANG to a UTF-8 locale")) from None


def _marks(model: SavedModel, source: str) -> list[Any]:
    """Marks of the weights, and of what is read, by which another model or input is noticed."""
    files = [path for folder in model.folders for path in sorted(folder.glob("*.safetensors"))]
    weights = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    if check_input(source):
        return [weights, file_marks(source)]
    # Nobody can read standard input again: such an output is never continued.
    return [weights, secrets.token_hex(8) if source == STANDARD_INPUT else source]


def file_marks(source: str) -> str:
    """What tells files that are read from others, and from themselves once they are changed."""
    return sources_fingerprint(find(source, "--input"))


class UnfinishedFile:
    """A file that is written in parts beside it until all are there. A part that is damaged is made anew, and so are
    those behind it.

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
def _tells_how_to_continue(output: UnfinishedFile | None) -> Iterator[None]:
    """A context in which Ctrl-C says that the same command goes on, where there is an output."""
    try:
        yield
    except KeyboardInterrupt:
        if output is None:
            raise
        text = say("interrupted; the same command continues after {rows}", rows=counted(output.rows, "row"))
        raise KeyboardInterrupt(text) from None
