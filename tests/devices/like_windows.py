"""Make this interpreter lack what Windows lacks, before anything of the program is imported.

Modules of POSIX cannot be imported, functions of `os` and signals are absent, there is no /proc and no /sys, the
process has no C library to load, and `sys.platform` says win32. What remains of Linux is the file system, so paths
work.
"""

from __future__ import annotations

import asyncio  # noqa: F401  the standard library decides by platform while it is imported: have it decided already
import builtins
import concurrent.futures  # noqa: F401
import ctypes
import ctypes.util
import functools
import importlib
import io
import multiprocessing  # noqa: F401
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile  # noqa: F401
import uuid  # noqa: F401
from typing import Any

import psutil

# On Windows libraries take other paths, which need Windows: they are imported as what they are.
LIBRARIES = """
numpy torch torch.distributed pyarrow pyarrow.parquet pyarrow.csv pyarrow.json pyarrow.fs pyarrow.dataset
tokenizers safetensors.torch accelerate loguru rich.live rich.table rich.progress_bar filelock fire yaml
"""
MODULES = ("resource", "fcntl", "termios", "pwd", "grp", "syslog", "pty", "tty", "readline")
# a fork through subprocess stays possible: Windows starts processes in its own way
FUNCTIONS = """
fork forkpty sysconf sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate killpg setsid getpgid
setpgid getuid geteuid getgid getloadavg mkfifo nice uname register_at_fork fchmod fchown chown sync wait3
wait4 pread pwrite getresuid O_DIRECTORY O_CLOEXEC
"""
SIGNALS = """
SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGCHLD SIGPIPE SIGALRM SIGSTOP SIGCONT SIGQUIT alarm
"""
HIDDEN = ("/proc", "/sys", "/dev/nvidia")


def _is_hidden(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(HIDDEN)  # type: ignore[arg-type]


def _open(real: Any) -> Any:
    def opened(path: Any, *arguments: Any, **options: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if _is_hidden(path) and not caller.startswith("psutil"):  # psutil looks there by itself
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *arguments, **options)

    return opened


def _without_library(name: Any, *arguments: Any, **options: Any) -> Any:
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return REAL_LIBRARY(name, *arguments, **options)


REAL_LIBRARY = ctypes.CDLL


def become_windows() -> None:
    """Take everything away, for good."""
    for library in LIBRARIES.split():
        importlib.import_module(library)
    tell = psutil.Process.memory_info
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in FUNCTIONS.split():
        if hasattr(os, name):
            delattr(os, name)
    for name in SIGNALS.split():
        if hasattr(signal, name):
            delattr(signal, name)
    ctypes.CDLL = _without_library  # type: ignore[assignment,misc]
    builtins.open = io.open = _open(builtins.open)  # type: ignore[assignment]
    pathlib.Path.exists = _hide(pathlib.Path.exists, False)  # type: ignore[method-assign,assignment]
    pathlib.Path.is_file = _hide(pathlib.Path.is_file, False)  # type: ignore[method-assign,assignment]
    psutil.Process.memory_info = functools.wraps(tell)(lambda self: _WindowsMemory(tell(self)))  # type: ignore
    platform.system = lambda: "Windows"
    platform.libc_ver = lambda *arguments, **options: ("", "")  # type: ignore[assignment]
    sys.platform = "win32"
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0, "processes can still be started"


def _hide(real: Any, answer: Any) -> Any:
    return lambda self, *arguments, **options: answer if _is_hidden(self) else real(self, *arguments, **options)


class _WindowsMemory:
    """What psutil tells of a process on Windows."""

    def __init__(self, memory: Any) -> None:
        self.rss = self.peak_wset = memory.rss
        self.private = memory.rss - memory.shared
