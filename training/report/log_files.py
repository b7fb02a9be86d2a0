"""The files that a run writes of itself: the log for people, which is loguru's, and `metrics.jsonl` for programs.

Each line is flushed, so that a killed run loses at most the line it was writing. On resume, what lies after the
checkpoint is dropped: each step stands once.
"""

from __future__ import annotations

import atexit
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from loguru import logger

from settings.errors import UserError
from support.language import english
from support.screen import visible
from support.storage import atomic_file, writing
from training.report.run_files import EventReader

LOG_PREFIX = "chat_trainer_low_mem_"
ESCAPED = "backslashreplace"  # Half of a surrogate pair, as of a name that is not UTF-8, becomes JSON's escape.
LINE = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level: <7} | {message}"
_log: TextIO | None = None


def open_log(log_dir: str | Path, run_name: str, is_main: bool, show: Callable[[str], None]) -> Path | None:
    """Send loguru's records to a new file, and warnings also to the screen.

    Args:
        log_dir: folder of the logs; made if missing.
        run_name: ends the file's name, and stands in the first line.
        is_main: other processes log nothing.
        show: takes one line of text for the screen.
    Returns:
        the log file, `chat_trainer_low_mem_<YYYYmmdd_HHMMSS>_<run>.log`; None if this process is not the main one.
    Raises:
        UserError: the folder cannot be written.
    """
    global _log
    close_log()
    if not is_main:
        return None
    with writing("log_dir", log_dir):
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        _log = _new_file(Path(log_dir), run_name)
    # With diagnose loguru would write the values of variables, texts of the user among them.
    logger.add(_append, level="TRACE", format=LINE, backtrace=False, diagnose=False, catch=False)
    logger.add(lambda message: show(str(message).rstrip("\n")), level="WARNING", format="{level.name}: {message}")
    logger.info("run {}", run_name)
    return Path(_log.name)


def _new_file(folder: Path, run_name: str) -> TextIO:
    """A log that no other start writes to: where one of this second and name is there, it is named by the next second.

    Opened to append: another program may empty it, as logrotate's copytruncate does.
    """
    second = time.time()
    while True:
        stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(second))
        path = folder / f"{LOG_PREFIX}{stamp}_{run_name}.log"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)  # Another start of this second may look at the same moment.
            return path.open("a", encoding="utf8")
        second += 1


def _append(line: str) -> None:
    """Write into the open log; a full disk raises a UserError, where loguru's own file would show a traceback."""
    assert _log is not None
    with writing("log_dir", Path(_log.name).parent):
        _log.write(visible(line))
        _log.flush()


def close_log() -> None:
    """Close the log file. A line that a full disk has not taken is lost; `_append` has raised an error for it."""
    global _log
    logger.remove()
    if _log is not None:
        with suppress(OSError):
            _log.close()
    _log = None


atexit.register(close_log)


def log_crash(traceback_text: str) -> Path | None:
    """Write a traceback into the open log, not to the screen, and close it.

    Returns:
        the log file, or None if there is none that can be written.
    """
    if _log is None or not Path(_log.name).is_file():  # Somebody may have removed the log of a run that goes on.
        return None
    path = Path(_log.name)
    try:
        _append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} | CRITICAL\n{traceback_text}")
    except UserError:
        return None
    finally:
        close_log()
    return path


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
            self._file = self.path.open(mode, encoding="utf8", errors=ESCAPED)

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
            shorter.open("w", encoding="utf8", errors=ESCAPED) as new,
        ):
            for event in EventReader(self.path).events():
                if event.get("step", 0) <= step or event["event"] == spared:
                    new.write(json.dumps(event, ensure_ascii=False) + "\n")
        self._open("a")

    def close(self) -> None:
        """Close the file. Each line was flushed; one that a full disk has not taken has raised its error in `write`."""
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
