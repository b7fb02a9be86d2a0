"""Where do checkpointed activations wait between forward and backward: on the device, or in the machine's RAM?

A recomputed block needs only its input, the checkpointed activation; together they grow with the number of blocks. Each is
copied to the host while the next block computes, and comes back while the block above it goes backward, so that the device
holds those of three blocks, however many there are. The input of a saved block stays with its graph.
Source: Rhu et al. 2016 (vDNN, arXiv 1602.08124), here for checkpointed activations alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from devices.copies import HostCopies, Parked
from engine.checkpointing import BlockPass


class CheckpointedActivations:
    """Checkpointed activations stay on the device."""

    def begin(self) -> None:
        """A walk begins."""

    def after_forward(self, row: Sequence[BlockPass]) -> None:
        """All micro-batches have passed through a block."""

    def before_backward(self, row: Sequence[BlockPass], following: Sequence[BlockPass]) -> None:
        """A block is about to go backward, and `following` after it (empty: none)."""


class Offload(CheckpointedActivations):
    """Checkpointed activations wait in the host's memory.

    Memory: on the device, those of three blocks; on the host, those of all, in slabs that stay.
    """

    def __init__(self, copies: HostCopies) -> None:
        self.copies = copies
        self._parked: dict[int, Parked] = {}  # id of a block's pass -> its input
        self._leaving: list[BlockPass] = []  # those whose copy may not have ended yet

    def begin(self) -> None:
        self.copies.settle()  # what an aborted step has left is freed
        self._parked, self._leaving = {}, []

    def after_forward(self, row: Sequence[BlockPass]) -> None:
        """Begin to copy this block's inputs to the host, and release those that were copied while it was computed."""
        for block_pass in self._leaving:
            self.copies.release(self._parked[id(block_pass)])
            block_pass.x = None  # it waits on the host
        self._leaving = []
        for block_pass in row:
            if not block_pass.is_saved:
                assert block_pass.x is not None
                self._parked[id(block_pass)] = self.copies.park(block_pass.x)
                self._leaving.append(block_pass)

    def before_backward(self, row: Sequence[BlockPass], following: Sequence[BlockPass]) -> None:
        """Bring this block's inputs back, and begin to fetch those of the next."""
        self._leaving = []  # those of the last block: being copied, still here, and needed now
        for block_pass in row:
            if id(block_pass) in self._parked:
                block_pass.x = self.copies.fetch(self._parked.pop(id(block_pass)))
        for block_pass in following:
            if id(block_pass) in self._parked:
                self.copies.begin_fetch(self._parked[id(block_pass)])
