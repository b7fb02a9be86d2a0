"""The program, of which process 1 is killed in the first attempt, and which is asked to stop in the second; for
test_processes.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.end_to_end.children.steps import run_with
from training.report.run_files import REQUEST_FILE


def around(number: int, compute: Callable[[], Any]) -> Any:
    """As ever, but for process 1."""
    if (os.environ["RANK"], number) == ("1", 9):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        (run,) = Path("logs").glob("pretrain_*/")
        (run / REQUEST_FILE).write_text("stop")
    return compute()


run_with(around)
