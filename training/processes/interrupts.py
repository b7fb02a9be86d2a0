"""Signals that end a run early without losing anything: the first asks, the second insists.

A launcher forwards the Ctrl-C that its children have already received from the terminal, and `kill` often comes from a
batch system that repeats itself: signals that follow the first shortly after count as the same request, not a second
one. A terminal that is closed asks as Ctrl-C does (SIGHUP), unless the run was started with `nohup`; what was written
to it is from then on written nowhere.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from support.language import say
from support.signals import INTERRUPTED

SHOW_CURSOR = b"\x1b[?25h"
HANGUP = "SIGHUP"


@contextmanager
def ends_like_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a terminal that is closed raise KeyboardInterrupt, where nothing else waits for them."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, _interrupt) for number in _known("SIGTERM", HANGUP)}
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def interrupt_main_thread() -> None:
    """Let the main thread take what SIGTERM does here; where nothing waits for that, as in a notebook, what Ctrl-C
    does.
    """
    number = next((one for one in (signal.SIGTERM, signal.SIGINT) if callable(signal.getsignal(one))), None)
    if number is None:
        return
    if hasattr(signal, "pthread_kill"):
        # This wakes the main thread from what it waits for.
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _leave_terminal(number)
    raise KeyboardInterrupt


def _known(*names: str) -> Iterator[int]:
    """Numbers of the signals that this system has; without that of a closing terminal where `nohup` has it ignored."""
    for name in names:
        number = getattr(signal, name, None)
        if number is not None and not (name == HANGUP and signal.getsignal(number) == signal.SIG_IGN):
            yield number


def _leave_terminal(number: int) -> None:
    """Where the terminal has gone, write nowhere what would be written to it: that would fail, and end the run."""
    if number != getattr(signal, HANGUP, None):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):  # The descriptor may be closed.
            # A terminal that has gone no longer says that it is one.
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _write(stream: TextIO, message: bytes) -> None:
    """Tell in a signal's handler: print may be what the signal has interrupted. Where nobody reads it, as after the
    Ctrl-C that has ended `tee` too, the step goes on all the same.
    """
    with suppress(OSError, ValueError):
        os.write(stream.fileno(), message)


class Interrupts:
    """Turn SIGINT, SIGTERM and SIGHUP into `stop_requested` while the context is open.

    Only the main thread of a process can take signals; elsewhere (a notebook's worker) the context does nothing.

    Args:
        is_main: whether this process tells the user.
        repeat_seconds: signals this close after the first one are repeats of it.
    """

    def __init__(self, is_main: bool = True, repeat_seconds: float = 1.0) -> None:
        self.stop_requested = False
        self._is_main = is_main
        self._repeat_seconds = repeat_seconds
        self._first_time = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _known("SIGINT", "SIGTERM", "SIGBREAK", HANGUP):  # The third is Windows' Ctrl-Break.
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def stop(self) -> None:
        """Take a request to stop as a first signal."""
        if not self.stop_requested:
            self.stop_requested = True
            self._first_time = time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        _leave_terminal(number)
        if not self.stop_requested:
            self.stop()
            self._tell(say("finishing the step and saving; press again to quit at once"))
        elif time.monotonic() - self._first_time >= self._repeat_seconds:
            self._tell(say("quit without saving"))
            if sys.__stdout__ is not None and sys.__stdout__.isatty():
                _write(sys.__stdout__, SHOW_CURSOR)  # A live display hides it.
            os._exit(INTERRUPTED)

    def _tell(self, text: str) -> None:
        if self._is_main and sys.__stderr__ is not None:
            _write(sys.__stderr__, f"\n{text!s}\n".encode())
