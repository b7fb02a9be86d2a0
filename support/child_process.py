"""Child processes: a function called in a fresh interpreter, with limits of memory and time, and other programs run.

What a child takes, it takes with it: memory that a library keeps, a crash, a file that unpacks to far more than it
shows. A fresh interpreter is used rather than `multiprocessing`: no helper process stays, and the user's main script is
not imported again. Children end with their parent. No other file of the project starts a process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from settings.errors import UserError
from settings.program import full_name, python_command
from support.language import say, speak, spoken
from support.screen import stand_guard
from support.signals import INTERRUPTED

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")
SERVE = (
    f"from {full_name('support.signals')} import leave_at_ctrl_c; leave_at_ctrl_c(False); "
    f"from {full_name('support.child_process')} import serve; serve()"
)
LOOK_SECONDS = 0.1  # Time between two looks at a child whose memory is limited.
OWN_LOOK_SECONDS = 0.005  # The same for a process that looks at itself.
CLOSING_SECONDS = 5  # A child has this long to end once its input has ended.
MEMORY = "memory"
TIME = "time"
CRASHED = "crashed"
FAILED = "failed"
OUT_OF_MEMORY = 137  # The exit code of a child that could not allocate, and of one that the system killed.
PR_SET_PDEATHSIG = 1


class ChildDied(Exception):
    """A child ended without an answer.

    Args:
        reason: MEMORY: it held more than its limit, or the system killed it, most likely for its memory. TIME: it took
            longer than its limit. CRASHED: a signal ended it. FAILED: anything else.
        detail: the last line of its errors where those are captured, else its exit code.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Worker:
    """A child that builds `make(*arguments)` once and calls what it got for each request; a context that ends it.

    Args:
        make: a function of a module. It, its arguments, requests and answers are picklable.
        max_bytes: anonymous memory of the child and its own children.
        max_cpu: seconds of processor time, and `patience` times that of waiting for its answers.
        environment: all its variables; None: this process's own. setup: a function called before anything else is
            imported.
        is_quiet: its errors are kept for `ChildDied` instead of shown. is_interruptible: Ctrl-C ends it; else the
            parent decides.
    """

    def __init__(
        self,
        make: Callable[..., Callable[[Any], Any]],
        *arguments: Any,
        max_bytes: int | None = None,
        max_cpu: float | None = None,
        patience: float = 20.0,
        environment: Mapping[str, str] | None = None,
        setup: Callable[[], object] | None = None,
        is_quiet: bool = False,
        is_interruptible: bool = True,
    ) -> None:
        self._killed_for: str | None = None
        self._is_limited = max_bytes is not None
        self._errors = tempfile.TemporaryFile() if is_quiet else None  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            python_command(SERVE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=None if environment is None else dict(environment),
        )
        if max_bytes is not None or max_cpu is not None:
            deadline = None if max_cpu is None else time.monotonic() + patience * max_cpu
            threading.Thread(target=self._watch, args=(max_bytes, deadline), daemon=True).start()
        # Each part is a pickle of its own, because `setup` has to run before the imports that the others cause.
        parts = ((os.getpid(), spoken(), is_interruptible), setup, (make, arguments), (max_bytes, max_cpu))
        with suppress(BrokenPipeError):  # `ask` says why the child has ended.
            for part in parts:
                self._send(part)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, request: Any) -> Any:
        """The answer to one request.

        Raises:
            UserError: raised there, of its own kind. ChildDied: see there. KeyboardInterrupt: it was interrupted.
        """
        assert self._process.stdout is not None
        try:
            self._send(request)
            problem, answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise self._death() from None
        except BaseException:
            self._process.kill()
            raise
        if problem is not None:
            kind, problems = problem
            raise kind(*problems)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._errors is not None:
            self._errors.close()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def _watch(self, max_bytes: int | None, deadline: float | None) -> None:
        """Look at the child from outside: a library that takes memory lets no thread of its own process run."""
        while self._process.poll() is None:
            is_late = deadline is not None and time.monotonic() > deadline
            if is_late or (max_bytes is not None and anonymous_bytes(self._process.pid) > max_bytes):
                self._killed_for = TIME if is_late else MEMORY
                self._process.kill()
                return
            time.sleep(LOOK_SECONDS)

    def _death(self) -> BaseException:
        code = self._process.wait()
        if code in (INTERRUPTED, -signal.SIGINT):
            return KeyboardInterrupt()
        detail: str = say("exit code {code}", code=code)
        if self._errors is not None:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines() or [detail]
            detail = next((line for line in reversed(lines) if "Error" in line), lines[-1])  # hints may follow it
        reason = FAILED
        if code in (OUT_OF_MEMORY, -getattr(signal, "SIGKILL", 9)) or (self._is_limited and code == -signal.SIGABRT):
            reason = MEMORY  # C++ and Rust abort where they cannot allocate.
        elif code == -getattr(signal, "SIGXCPU", 0):
            reason = TIME
        elif code < 0:
            reason = CRASHED
        return ChildDied(self._killed_for or reason, detail)


def call(function: Callable[..., Result] | str, *arguments: Any, **limits: Any) -> Result:
    """The result of a module's function, computed in a child of its own.

    Args:
        function: or `module:name`, of a module of this program that this process does not import.
        limits: `max_bytes`, `max_cpu` and the others of `Worker`.
    Raises:
        as `Worker.ask`.
    """
    with Worker(_applying, function, **limits) as worker:
        result: Result = worker.ask(arguments)
    return result


def _applying(function: Callable[..., Result] | str) -> Callable[[Any], Result]:
    if isinstance(function, str):
        module, _, name = function.partition(":")
        function = getattr(importlib.import_module(full_name(module)), name)
    return lambda arguments: function(*arguments)  # type: ignore[operator]


def run(argv: Sequence[str], seconds: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run another program to its end and capture its output.

    Raises:
        OSError, subprocess.TimeoutExpired: it cannot be started, or was killed after so many seconds.
    """
    return subprocess.run(
        list(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False, **more
    )


def start(argv: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a program that goes on by itself; its streams are this process's own where nothing is said."""
    return subprocess.Popen(list(argv), **streams)


async def start_async(argv: Sequence[str], **more: Any) -> asyncio.subprocess.Process:
    """Start a program and talk with it through pipes."""
    import asyncio  # It is imported here because every child process would pay a twentieth of a second for it.

    streams = {name: asyncio.subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    return await asyncio.create_subprocess_exec(*argv, **{**streams, **more})


async def run_async(argv: Sequence[str], seconds: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run another program to its end and capture its output; where nobody waits any longer it is killed.

    Raises:
        asyncio.TimeoutError: it was killed after so many seconds.
    """
    import asyncio

    child = await start_async(argv, stdin=asyncio.subprocess.DEVNULL, **more)
    try:
        output, errors = await asyncio.wait_for(child.communicate(), seconds)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return subprocess.CompletedProcess(
        argv, child.returncode or 0, output.decode("utf8", "replace"), errors.decode("utf8", "replace")
    )


def anonymous_bytes(pid: int) -> int:
    """Memory of a process and its descendants that the system cannot drop, in bytes; 0 once it has ended.

    Where a system does not tell files that are mapped apart from the rest, they count.
    """
    total = 0
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with suppress(psutil.Error):
                memory = process.memory_info()
                total += int(memory.rss) - int(getattr(memory, "shared", 0))
    return total


def serve() -> None:
    """The child's side: requests come from standard input, answers go to standard output."""
    stand_guard()
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # Whatever a library prints must not mix with the answers.
        try:
            parent, language, is_interruptible = pickle.load(sys.stdin.buffer)
            exit_with_parent(parent)
            signal.signal(signal.SIGINT, signal.default_int_handler if is_interruptible else signal.SIG_IGN)
            speak(language)
            setup = pickle.load(sys.stdin.buffer)
            if setup is not None:
                setup()
            make, arguments = pickle.load(sys.stdin.buffer)
            limit_self(*pickle.load(sys.stdin.buffer))
            work: Callable[[Any], Any] | None = None
            while True:
                request = pickle.load(sys.stdin.buffer)
                try:
                    work = work or make(*arguments)
                    reply: tuple[Any, Any] = (None, work(request))
                except UserError as error:
                    reply = ((type(error), error.problems), None)
                pickle.dump(reply, answers, pickle.HIGHEST_PROTOCOL)
                answers.flush()
        except (EOFError, BrokenPipeError):
            os._exit(0)  # The parent is done, or gone.
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)


def limit_self(max_bytes: int | None, max_cpu: float | None) -> None:
    """Limits of the system on this process, where it has them: a single allocation passes them sooner than the parent
    looks.
    """
    try:
        import resource
    except ImportError:
        return
    with suppress(ValueError, OSError):  # A lower limit is set already.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if max_bytes is not None and sys.platform == "linux":
            # The limit counts memory that is promised, the stacks of threads included.
            limit = int(psutil.Process().memory_info().data) + max_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with suppress(ValueError, OSError):
        if max_cpu is not None:
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = int(used.ru_utime + used.ru_stime + max_cpu) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def stay_within(max_bytes: int) -> None:
    """End this process before its anonymous memory is more than `max_bytes`; runs in a thread, until then.

    Memory that was promised and is not used does not count, as it does for `limit_self`: at each look the process may
    map as much as is left.
    """
    process = psutil.Process()
    while True:
        memory = process.memory_info()
        free_bytes = max_bytes - (memory.rss - getattr(memory, "shared", 0))
        if free_bytes < 0:
            os._exit(OUT_OF_MEMORY)
        if sys.platform == "linux":
            import resource

            hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
            with suppress(ValueError, OSError):  # A lower limit is set already.
                resource.setrlimit(resource.RLIMIT_DATA, (memory.data + free_bytes, hard_limit))
        time.sleep(OWN_LOOK_SECONDS)


def exit_with_parent(parent: int) -> None:
    """Let this process get SIGTERM when its parent ends, or has ended, also where that is killed.

    Linux sends it (prctl(2), PR_SET_PDEATHSIG); elsewhere a thread looks who the parent is; under Windows a child ends
    when its pipe breaks.
    """
    if os.name != "posix":
        return
    is_sent = False
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            is_sent = ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) == 0

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    if not is_sent:
        threading.Thread(target=wait, daemon=True).start()
    elif os.getppid() != parent:  # The parent ended before the system was asked.
        os.kill(os.getpid(), signal.SIGTERM)
