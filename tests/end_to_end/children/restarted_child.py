"""The program, of which process 1 is killed in the first attempt, and which is asked to stop in the second; for test_processes.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from engine.blockwise import Objective
from run_files import REQUEST_FILE
from train_low_mem import main

plain = Objective.loss_and_gradients
steps = 0


def loss_and_gradients(self: Objective, *facts: Any) -> Any:
    """As ever, but for process 1."""
    global steps
    steps += 1
    if (os.environ["RANK"], steps) == ("1", 9):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        (run,) = Path("logs").glob("pretrain_*/")
        (run / REQUEST_FILE).write_text("stop")
    return plain(self, *facts)


Objective.loss_and_gradients = loss_and_gradients  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
