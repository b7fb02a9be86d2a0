"""The program, in which process 1 meets a loss that is nan, and process 0 a gradient that is; for test_processes.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from engine.blockwise import Objective
from train_low_mem import main

plain = Objective.loss_and_gradients
steps = 0


def loss_and_gradients(self: Objective, *facts: Any) -> Any:
    """As ever, but for two steps."""
    global steps
    steps += 1
    loss, grad = plain(self, *facts)
    if (os.environ["RANK"], steps) == ("1", 5):
        return loss * float("nan"), grad
    if (os.environ["RANK"], steps) == ("0", 9):
        return loss, grad * float("nan")
    return loss, grad


Objective.loss_and_gradients = loss_and_gradients  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
