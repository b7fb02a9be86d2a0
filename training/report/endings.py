"""Names of the ways to end a run early, shared by signals and files."""

from __future__ import annotations

from leaving import INTERRUPTED

STOP, SAVE = "stop", "save"  # requests


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, has finished its step and has saved. Ends the program with its exit code."""

    code = INTERRUPTED


class StaysStopped(Interrupted):
    """The run was stopped as asked, and its launcher, to which that is a failure, has started it again: now it is none."""

    code = 0
