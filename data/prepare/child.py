"""How does a memory-hungry piece of work leave nothing behind in this process?

It runs in a fresh interpreter, which takes its memory with it when it ends, and ends with its parent. A plain child process
is used rather than `multiprocessing`: no helper process stays, and the user's main script is not imported a second time.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from childproc import exit_with_parent
from language import speak, spoken
from leaving import INTERRUPTED
from memory.observe.processes import tree_pids, usage_of
from screen import stand_guard
from settings.errors import DoesNotFit, UserError
from units import format_size

Result = TypeVar("Result")
ROOT = str(Path(__file__).resolve().parent.parent.parent)
BEFORE = f"import sys; sys.path.insert(0, {ROOT!r}); from leaving import leave_at_ctrl_c; leave_at_ctrl_c(False)"
START = f"{BEFORE}; from data.prepare.child import serve; serve()"
LOOK_SECONDS = 0.1  # between two looks at a process whose memory is bounded


def call_in_child(function: Callable[..., Result], *arguments: Any, most_bytes: int | None = None) -> Result:
    """Call a function of a module in a fresh process and wait.

    Args:
        function, arguments, and the result must be picklable.
        most_bytes: of memory that the process and its children may hold; None: any.
    Raises:
        UserError: raised by the function. DoesNotFit: the process held more, or the system killed it, most likely for its memory.
        KeyboardInterrupt: it was interrupted. RuntimeError: it failed; its traceback is on the screen.
    """
    request = pickle.dumps((os.getpid(), spoken(), function, arguments))
    name = f"{function.__module__}.{function.__qualname__}"
    with subprocess.Popen([sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as done:
        try:
            said = _answer(done, request, most_bytes)
        except BaseException:
            done.kill()
            raise
    if done.returncode in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if done.returncode == -getattr(signal, "SIGKILL", 9):
        raise DoesNotFit(f"{name} was killed by the system, most likely for lack of memory; free some")
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed in its process with exit code {done.returncode}; its messages stand above")
    answer: tuple[list[str] | None, Result] = pickle.loads(said)
    problems, result = answer
    if problems is not None:
        raise UserError(*problems)
    return result


def _answer(process: subprocess.Popen[bytes], request: bytes, most_bytes: int | None) -> bytes:
    """What a process says in the end; it is looked at from outside, as a library that takes memory lets nobody else run."""
    left: bytes | None = request
    while True:
        try:
            return process.communicate(left, None if most_bytes is None else LOOK_SECONDS)[0]
        except subprocess.TimeoutExpired:
            left = None
        held = usage_of(tree_pids(process.pid)).anon_bytes
        if most_bytes is not None and held > most_bytes:
            raise DoesNotFit(
                f"preparing the rows holds {format_size(held)}, and there is room for {format_size(most_bytes)}: a row may be far "
                "larger than the others, or unpack to far more than it shows; what was done before is kept. Look at the file "
                "named last, or give --memory_budget more"
            )


def serve() -> None:
    """Answer one call: the request comes from standard input, the answer goes to standard output."""
    stand_guard()
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # whatever a library prints must not mix with the answer
        try:
            parent, language, function, arguments = pickle.load(sys.stdin.buffer)
            exit_with_parent(parent)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            speak(language)
            reply: tuple[list[str] | None, Any] = (None, function(*arguments))
        except UserError as error:
            reply = (error.problems, None)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        pickle.dump(reply, answer)
