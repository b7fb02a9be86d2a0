"""Ctrl-C before a command has begun, and after it has ended: one line, exit code 130.

Python would print a traceback of whatever was being imported, or tidied up, at that moment. So this is imported before
all else and imports nothing that Python has not loaded by itself. While a command runs, Ctrl-C raises
KeyboardInterrupt, as its code expects; where Python can only print that, because nobody can catch it, the process ends
here too.
"""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130  # The exit code of an interrupted program.


def leave_at_ctrl_c(is_heard: bool = True) -> None:
    """Let an interrupt end this process at once, until another handler takes the signal, and again after it.

    Args:
        is_heard: whether the user is told; a child leaves that to its parent.
    """

    def leave(*_: object) -> None:
        try:
            sys.stdout.flush()
            if is_heard and os.environ.get("RANK", "0") == "0":  # The first process of a launch tells.
                os.write(2, b"\ninterrupted\n")
        finally:  # The process ends whatever state Python is in, and whoever reads.
            os._exit(INTERRUPTED)

    def at_its_end(kind: type[BaseException], error: BaseException, trace: object) -> None:
        if issubclass(kind, KeyboardInterrupt):
            leave()
        sys.__excepthook__(kind, error, trace)  # type: ignore[arg-type]

    def where_nobody_catches(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            leave()
        sys.__unraisablehook__(unraisable)

    sys.excepthook = at_its_end
    sys.unraisablehook = where_nobody_catches
    import signal  # This takes a moment, in which the first hook answers.

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # A shell's `command &` has it ignored.
        signal.signal(signal.SIGINT, leave)


def comes_from_interrupt(error: BaseException) -> bool:
    """Whether an error is what a library has made of an interrupt, as C++ does while it imports Python."""
    cause: BaseException | None = error
    while isinstance(cause, (ImportError, SystemError)):
        cause = cause.__cause__ or cause.__context__
    return isinstance(cause, KeyboardInterrupt)
