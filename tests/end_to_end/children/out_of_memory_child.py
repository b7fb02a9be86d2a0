"""The program, in which process 1 runs out of memory in the middle of two of its passes; for test_processes.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from engine.blockwise import Blockwise, CheckpointedBlock
from train_low_mem import main

FAILS = {5: 1, 9: 4}  # pass -> blocks of its backward that succeed: none is updated yet, or some blocks are
plain_gradients, plain_backward = Blockwise.gradients, CheckpointedBlock.backward
passes = 0


def gradients(self: Blockwise, *facts: Any) -> Any:
    """As ever, but for the passes that fail."""
    global passes
    passes += 1
    done = 0

    def backward(block_pass: CheckpointedBlock, grad: Any) -> Any:
        nonlocal done
        done += 1
        if done > FAILS[passes]:
            CheckpointedBlock.backward = plain_backward  # type: ignore[method-assign]
            raise MemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes.")
        return plain_backward(block_pass, grad)

    if os.environ["RANK"] == "1" and passes in FAILS:
        CheckpointedBlock.backward = backward  # type: ignore[method-assign]
    return plain_gradients(self, *facts)


Blockwise.gradients = gradients  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
