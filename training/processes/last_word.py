"""How is a run's last line seen under a launcher? Told once more when the launcher has ended.

accelerate and torchrun answer Ctrl-C with tracebacks of their own, some pages long, after the run has said where it was saved
and how it continues. A small process waits for the launcher's end and says it below them; it lives a minute at most.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from screen import visible
from training.processes.launch import is_launched

WAIT_SECONDS = 60
# where there are no descriptors of processes, a launcher that ended but was not waited for seems to live
WAITER = f"""
import os, select, sys, time
launcher, text = int(sys.argv[1]), sys.argv[2]
end = time.monotonic() + {WAIT_SECONDS}
has_ended = False
try:
    has_ended = bool(select.select([os.pidfd_open(launcher)], [], [], {WAIT_SECONDS})[0])
except (AttributeError, OSError):
    while time.monotonic() < end and not has_ended:
        try:
            os.kill(launcher, 0)
            time.sleep(0.05)
        except OSError:
            has_ended = True
if has_ended:
    print(text, file=sys.stderr, flush=True)
"""


def say_after_launcher(text: str) -> None:
    """Say something on standard error once the launcher of this process, if there is one, has ended."""
    if not is_launched() or os.name != "posix":
        return
    nowhere = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1)]
    with suppress(OSError):  # the text has been said before
        words = [sys.executable, "-S", "-c", WAITER, str(os.getppid()), visible(text)]
        os.posix_spawn(sys.executable, words, os.environ, file_actions=nowhere, setpgroup=0)
