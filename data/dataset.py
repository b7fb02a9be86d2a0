"""How is one row read out of files of any size in flat memory?

`LowMemDataset` gives rows by number from Arrow IPC files, Arrow streams (Hugging Face's `.arrow`) and Parquet. Values are
copied out: a slice of a batch would keep the whole batch alive. Three modes:

- mmap: files are mapped and kept open; their pages belong to the system's page cache and are given back under pressure.
- file: files are kept open, and only the bytes of the row are read; no page is mapped.
- reopen (`ultra_low_mem`): the same, and the file is opened anew for every read, so that nothing at all is held.

On network mounts use file or reopen: a mapped page that cannot be fetched ends the process.
"""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.sources.files import TABLES, Source, find
from data.sources.row_access import MMAP, MODES, REOPEN, ArrowTable, ParquetTable, TableFile, starts
from data.sources.tables import broken_file_is_user_error
from formats import PARQUET
from settings.errors import UserError
from settings.fields import listed

DROP_EVERY_READS = 1024
MOST_PROBLEMS = 20  # that are told of one dataset's columns
MOST_OPEN_FILES = 64  # the system's limit on open files is often 1024, or 256


class LowMemDataset(Sequence[dict[str, Any]]):
    """Rows by number from Arrow and Parquet files of any size. Safe to fork and to pickle.

    Args:
        path_or_paths: a file, a folder, a glob, or a list of these; rows count on from file to file.
        columns: the columns of a row; None: all.
        ultra_low_mem: open the file anew for every read, the same as mode "reopen".
        mode: "mmap", "file" or "reopen"; None: mmap, or reopen with `ultra_low_mem`.
        drop_page_cache: tell the system every 1024 reads that it need not keep what was read, for containers whose limit
        counts file pages. Later reads of the same rows then come from the disk.
    Raises:
        UserError: a file is missing, broken, of a kind that has no rows by number, or lacks a column.
    Memory:
        8 bytes per record batch (none for our own shards), without a mapping 24 more per column, 1.5 KB per Parquet row
        group; reads leave nothing behind but reclaimable file pages, for Parquet one row group, of a large one 8 MiB.
    """

    def __init__(
        self,
        path_or_paths: str | Path | Sequence[str | Path],
        columns: Sequence[str] | None = None,
        ultra_low_mem: bool = False,
        *,
        mode: str | None = None,
        drop_page_cache: bool = False,
    ) -> None:
        self.mode = mode or (REOPEN if ultra_low_mem else MMAP)
        self.ultra_low_mem, self.drop_page_cache = self.mode == REOPEN, drop_page_cache
        self._check_mode(ultra_low_mem)
        self._reads = 0
        paths = [path_or_paths] if isinstance(path_or_paths, (str, Path)) else list(path_or_paths)
        sources = [source for path in paths for source in find(str(path), "path")]
        self._files = [self._open(source) for source in sources]
        self.columns = list(columns) if columns is not None else list(self._files[0].columns)
        self._check_columns()
        self._starts = starts(file.num_rows for file in self._files)
        self._recent: deque[int] = deque()  # files that hold something open
        self._pid = os.getpid()

    def _check_mode(self, ultra_low_mem: bool) -> None:
        problems = []
        if self.mode not in MODES:
            problems.append(f"mode = {self.mode}, is not known; allowed: {', '.join(MODES)}")
        elif ultra_low_mem and self.mode != REOPEN:
            problems.append(f"mode = {self.mode}, contradicts ultra_low_mem = True; leave one of them out")
        if self.drop_page_cache and not hasattr(os, "posix_fadvise"):
            problems.append("drop_page_cache = True, this system does not support it; leave it out")
        if problems:
            raise UserError(*problems)

    def _open(self, source: Source) -> TableFile:
        if not isinstance(source.path, Path):
            raise UserError(
                f"{source.path}: an address has no rows by number; fetch it, or turn it into shards with prepare"
            )
        if source.kind not in TABLES:
            raise UserError(
                f"{source.path}: {source.kind} has no rows by number; turn it into shards with the prepare command"
            )
        with broken_file_is_user_error(source.path, source.kind):
            return (ParquetTable if source.kind == PARQUET else ArrowTable)(source, self.mode)

    def _check_columns(self) -> None:
        problems = [
            f"{file.source.path}: column {name} {'occurs twice' if name in file.columns else 'is missing'}; "
            f"columns: {listed(file.columns)}"
            for file in self._files
            for name in dict.fromkeys(self.columns)
            if file.columns.count(name) != 1
        ]
        if problems:
            raise UserError(*problems[:MOST_PROBLEMS])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        """Read one row.

        Args:
            index: 0 .. len - 1, or counted from the end if negative; slices are not taken.
        Raises:
            IndexError: no such row. UserError: the file broke since it was opened.
        """
        row = operator.index(index)
        row = row + len(self) if row < 0 else row
        if not 0 <= row < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self._pid != os.getpid():  # handles of the parent process are not ours
            self.close()
            self._pid = os.getpid()
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        file = self._recently(number)
        with broken_file_is_user_error(file.source.path, file.source.kind):
            values = file.read(row - int(self._starts[number]), self.columns)
        self._reads += 1
        if self.drop_page_cache and self._reads % DROP_EVERY_READS == 0:
            self._drop_pages()
        return values

    def _drop_pages(self) -> None:
        """Ask the system to forget the pages of all files that were read; they must not be mapped for that."""
        recent = list(self._recent)
        self.close()
        for number in recent:
            with self._files[number].source.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _recently(self, number: int) -> TableFile:
        """Give a file, and close the one that was opened longest ago if many are open."""
        if number not in self._recent:
            if len(self._recent) == MOST_OPEN_FILES:
                self._files[self._recent.popleft()].close()
            self._recent.append(number)
        return self._files[number]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def close(self) -> None:
        """Let go of all open files; a later read opens them again."""
        for number in self._recent:
            self._files[number].close()
        self._recent.clear()

    def __getstate__(self) -> dict[str, Any]:
        self.close()
        return self.__dict__


class TokenStream:
    """The rows of a token stream read as windows of another length.

    Args:
        dataset: rows of `tokens`, all of the same length but the last.
        window_tokens: length of a window, 2 or more.
    Raises:
        UserError: there are no tokens, or on reading a window, rows are of another length.
    """

    def __init__(self, dataset: Sequence[dict[str, Any]], window_tokens: int) -> None:
        self.dataset = dataset
        self.row_tokens = len(dataset[0]["tokens"])
        self.num_tokens = (len(dataset) - 1) * self.row_tokens + len(dataset[len(dataset) - 1]["tokens"])
        self.window_tokens = min(window_tokens, self.num_tokens)
        if not self.row_tokens:
            raise UserError("the token stream is empty; delete the shards folder and prepare it again")

    def __len__(self) -> int:
        """Whole windows; a stream shorter than one window is one short window."""
        return self.num_tokens // self.window_tokens

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Give a window, (window_tokens,) int64, read from the rows that it crosses."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin = index * self.window_tokens
        end = begin + self.window_tokens
        first, last = begin // self.row_tokens, (end - 1) // self.row_tokens
        tokens = np.concatenate([self.dataset[row]["tokens"] for row in range(first, last + 1)])
        window = tokens[begin - first * self.row_tokens : end - first * self.row_tokens].astype(np.int64)
        if len(window) != self.window_tokens:
            raise UserError(
                f"rows {first + 1} to {last + 1} of the token stream are not of {self.row_tokens} tokens; "
                "delete the shards folder and prepare it again"
            )
        return window
