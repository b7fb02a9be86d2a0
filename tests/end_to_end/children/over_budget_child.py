"""The program, in which one step takes memory that no plan knows, for a moment; for test_memory.py.

Args: the step, how many MiB, and then what is typed after the program's name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from engine.step import Engine
from support.units import MIB
from train_low_mem import main

plain = Engine.step


def step(self: Engine, about: Any, *facts: Any) -> Any:
    """As ever, but for one step."""
    if about.number == int(sys.argv[1]):
        np.ones(int(sys.argv[2]) * MIB, dtype=np.uint8)
    return plain(self, about, *facts)


if __name__ == "__main__":
    Engine.step = step  # type: ignore[method-assign]
    sys.exit(main(sys.argv[3:]))
