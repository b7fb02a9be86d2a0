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

from devices.lifeline import end_with
from language import speak, spoken
from leaving import INTERRUPTED
from screen import stand_guard
from settings.fields import DoesNotFit, UserError

Result = TypeVar("Result")
ROOT = str(Path(__file__).resolve().parent.parent.parent)
BEFORE = f"import sys; sys.path.insert(0, {ROOT!r}); from leaving import leave_at_ctrl_c; leave_at_ctrl_c(False)"
START = f"{BEFORE}; from data.prepare.child import serve; serve()"


def call_in_child(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of a module in a fresh process and wait.

    Args:
        function, arguments, and the result must be picklable.
    Raises:
        UserError: raised by the function. DoesNotFit: the system killed the process, most likely for its memory.
        KeyboardInterrupt: it was interrupted. RuntimeError: it failed; its traceback is on the screen.
    """
    request = pickle.dumps((os.getpid(), spoken(), function, arguments))
    done = subprocess.run([sys.executable, "-c", START], input=request, stdout=subprocess.PIPE, check=False)
    name = f"{function.__module__}.{function.__qualname__}"
    if done.returncode in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if done.returncode == -getattr(signal, "SIGKILL", 9):
        raise DoesNotFit(f"{name} was killed by the system, most likely for lack of memory; free some")
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed in its process with exit code {done.returncode}; its messages stand above")
    answer: tuple[list[str] | None, Result] = pickle.loads(done.stdout)
    problems, result = answer
    if problems is not None:
        raise UserError(*problems)
    return result


def serve() -> None:
    """Answer one call: the request comes from standard input, the answer goes to standard output."""
    stand_guard()
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # whatever a library prints must not mix with the answer
        try:
            parent, language, function, arguments = pickle.load(sys.stdin.buffer)
            end_with(parent)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            speak(language)
            reply: tuple[list[str] | None, Any] = (None, function(*arguments))
        except UserError as error:
            reply = (error.problems, None)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        pickle.dump(reply, answer)
