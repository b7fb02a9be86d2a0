"""How may a run be ended early, in the words that signals and files share?"""

from __future__ import annotations

EXIT_CODE = 130
STOP, SAVE = "stop", "save"  # wishes


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, has finished its step and has saved. Ends the program with exit code 130."""
