"""Code run in a child process, where `measure` watches the memory of one piece of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import warm

# what the child runs first: `measure(work)` gives the most anonymous memory that `work` held above what was there
# before; with "VmRSS" the pages of files too
MEASURE = """
import sys
import threading
import torch


def held(what):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what))


def measure(work, what="RssAnon"):
    before, peak, done = held(what), [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], held(what))
            done.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()
    done.set()
    watcher.join()
    return max(peak[0], held(what)) - before
"""


def in_child(code: str, *words: object) -> list[int]:
    """Run code after `MEASURE` in a child process.

    Args:
        words: its `sys.argv[1:]`.
    Returns:
        the whole numbers that it prints.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("this system has no /proc to read memory from")
    done = warm.run(MEASURE + code, [str(word) for word in words], os.environ)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]
