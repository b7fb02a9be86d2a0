"""Names of the ways to end a run early, shared by signals and files."""

from __future__ import annotations

from support.signals import INTERRUPTED

STOP = "stop"
SAVE = "save"


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, has finished its step and has saved. Ends the program with its exit code."""

    code = INTERRUPTED


class StaysStopped(Interrupted):
    """The run was stopped by the page or a callback, and torchrun would start it again after any exit code but this."""

    code = 0
