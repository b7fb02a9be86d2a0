"""How does a child process end with its parent, also where that is killed alone and can ask for nothing?

Linux sends a signal that the child has asked for when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG). Elsewhere
under POSIX a thread of the child looks who its parent is. Under Windows nothing is done: a child ends when its pipe breaks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 1.0


def end_with(parent: int) -> None:
    """Let this process be ended by SIGTERM when its parent ends, or has ended already.

    Args:
        parent: its process id, which it hands to its child.
    """
    if os.name != "posix":
        return
    if not (sys.platform == "linux" and _asked_linux()):
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    elif os.getppid() != parent:  # it ended before it was asked for
        os.kill(os.getpid(), signal.SIGTERM)


def _asked_linux() -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
