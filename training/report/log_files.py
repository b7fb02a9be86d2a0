"""The files that a run writes of itself: the log for people, which is loguru's, and `metrics.jsonl` for programs.

Each line is flushed, so that a killed run loses at most the line it was writing. On resume, what lies after the
checkpoint is dropped: each step stands once.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from loguru import logger

from common.language import english
from common.screen import visible
from common.storage import atomic_file, writing
from training.report.run_files import EventReader

LOG_PREFIX = "chat_trainer_low_mem_"
HALVES = "backslashreplace"  # half of a surrogate pair, as of a name that is not UTF-8, becomes JSON's escape
LINE = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level: <7} | {message}"
_open_log: Path | None = None


def open_log(
    log_dir: str | Path, run_name: str, is_main: bool = True, console: Callable[[str], None] | None = None
) -> Path | None:
    """Send loguru's records to a new file, and warnings also to the screen.

    Args:
        log_dir: folder of the logs; made if missing.
        run_name: ends the file's name, and is told in the first line.
        is_main: other processes log nothing.
        console: takes one line of text for the screen, e.g. `Progress.note`; by default standard error.
    Returns:
        the log file, `chat_trainer_low_mem_<YYYYmmdd_HHMMSS>_<run>.log`; None if this process is not the main one.
    Raises:
        UserError: the folder cannot be written.
    """
    global _open_log
    logger.remove()
    if not is_main:
        return None
    with writing("log_dir", log_dir):
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        file = _new_file(Path(log_dir), run_name)
    # diagnose would write the values of variables, texts of the user among them
    logger.add(_LogFile(file), level="TRACE", format=LINE, backtrace=False, diagnose=False, catch=False)
    tell = console or (lambda text: print(text, file=sys.stderr))
    logger.add(lambda message: tell(str(message).rstrip("\n")), level="WARNING", format="{level.name}: {message}")
    _open_log = Path(file.name)
    logger.info("run {}", run_name)
    return _open_log


def _new_file(folder: Path, run_name: str) -> TextIO:
    """A log that no other start writes to: where one of this second and name is there, it is named by the next second.

    Opened to append: another program may empty it, as logrotate's copytruncate does.
    """
    second = time.time()
    while True:
        stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(second))
        path = folder / f"{LOG_PREFIX}{stamp}_{run_name}.log"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)  # another start of this second may look at the same moment
            return path.open("a", encoding="utf8")
        second += 1


class _LogFile:
    """Where loguru's lines go: a full disk is told as such, where loguru would show a traceback for each line and go
    on.
    """

    def __init__(self, file: TextIO) -> None:
        self._folder, self._file = Path(file.name).parent, file

    def write(self, line: str) -> None:
        """Append a line and flush it."""
        with writing("log_dir", self._folder):
            self._file.write(visible(line))
            self._file.flush()

    def stop(self) -> None:
        """Close the file, as loguru asks at the end; what a full disk has not taken is lost, and has been told."""
        with suppress(OSError):
            self._file.close()


def close_log() -> None:
    """Close the log file."""
    global _open_log
    logger.remove()
    _open_log = None


def log_crash(traceback_text: str) -> Path | None:
    """Write a traceback into the open log, not to the screen.

    Returns:
        the log file, or None if no log is open.
    """
    place = _open_log
    if place is None:
        return None
    close_log()
    try:
        with place.open("a", encoding="utf8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} | CRITICAL\n{visible(traceback_text)}")
    except OSError:
        return None
    return place


class MetricsFile:
    """The events of one run, one JSON object a line, `event` first.

    Args:
        path: usually `log_dir/run_name/metrics.jsonl`; its folder is made if missing.
        keep_until: the step up to which what the file holds stays; None: it starts empty.
    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path, keep_until: int | None = None) -> None:
        self.path = path
        self._open("w" if keep_until is None else "a")
        if keep_until is not None:
            self.truncate_after(keep_until)

    def _open(self, mode: str) -> None:
        with writing("log_dir", self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open(mode, encoding="utf8", errors=HALVES)

    def write(self, event: dict[str, Any]) -> None:
        """Append one event, of what JSON knows."""
        with writing("log_dir", self.path.parent):
            self._file.write(json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()

    def truncate_after(self, step: int, spared: str | None = None) -> None:
        """Drop the events of later steps, and lines that are no event, such as the torn last line of a killed run.

        Events without a step stay. The file is replaced at once, so a kill meanwhile leaves the old one.

        Args:
            step: the checkpoint's step; 0 keeps no step at all. spared: events of this name stay.
        Memory: one line.
        """
        self._file.close()
        with (
            writing("log_dir", self.path.parent),
            atomic_file(self.path) as shorter,
            shorter.open("w", encoding="utf8", errors=HALVES) as new,
        ):
            for event in EventReader(self.path).events():
                if event.get("step", 0) <= step or event["event"] == spared:
                    new.write(json.dumps(event, ensure_ascii=False) + "\n")
        self._open("a")

    def close(self) -> None:
        """Close the file. Each line was flushed: one that a full disk has not taken has been told."""
        with suppress(OSError):
            self._file.close()


def plain(value: Any) -> Any:
    """Turn what numpy, torch and pathlib give into what JSON knows; numbers that are not finite into null."""
    if isinstance(value, dict):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    value = english(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
