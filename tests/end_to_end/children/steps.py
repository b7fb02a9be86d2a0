"""The program with something that happens around each of its losses, as the children of test_processes.py say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from engine.blockwise import Objective
from train_low_mem import main


def run_with(around: Callable[[int, Callable[[], Any]], Any]) -> None:
    """Run the program by the arguments of this process, and end with its exit code.

    Args:
        around: gets the number of the loss, from 1, and what computes it and its gradient; returns both.
    """
    plain = Objective.loss_and_gradients
    number = 0

    def loss_and_gradients(self: Objective, *facts: Any) -> Any:
        nonlocal number
        number += 1
        return around(number, lambda: plain(self, *facts))

    Objective.loss_and_gradients = loss_and_gradients  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
