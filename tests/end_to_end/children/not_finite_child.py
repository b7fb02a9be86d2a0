"""The program, in which process 1 meets a loss that is nan, and process 0 a gradient that is; for test_processes.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.end_to_end.children.steps import run_with


def around(number: int, compute: Callable[[], Any]) -> Any:
    """As ever, but for two steps."""
    loss, grad = compute()
    if (os.environ["RANK"], number) == ("1", 5):
        return loss * float("nan"), grad
    if (os.environ["RANK"], number) == ("0", 9):
        return loss, grad * float("nan")
    return loss, grad


run_with(around)
