"""Activation offload: checkpointed activations wait in the machine's RAM between forward and backward.

A recomputed block needs only its input, the checkpointed activation; together they grow with the number of blocks. Each is
copied to the host while the next block computes, and comes back while the block above it goes backward, so that the device
holds those of three blocks, however many there are. The input of a saved block stays with its graph.
Source: Rhu et al. 2016 (vDNN, arXiv 1602.08124), here for checkpointed activations alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from devices.copies import HostCopies, Parked
from engine.gradient_checkpointing import CheckpointedBlock


class ActivationOffload:
    """The checkpointed activations of one pass at a time.

    Memory: on the device, those of three blocks; on the host, those of all, in slabs that stay.
    """

    def __init__(self, copies: HostCopies) -> None:
        self.copies = copies
        self._parked: dict[int, Parked] = {}  # id of a CheckpointedBlock -> its input
        self._leaving: list[CheckpointedBlock] = []  # those whose copy may not have ended yet

    def begin(self) -> None:
        """A pass begins; what an aborted one has left is freed."""
        self.copies.settle()
        self._parked, self._leaving = {}, []

    def after_forward(self, blocks: Sequence[CheckpointedBlock]) -> None:
        """Begin to copy a block's inputs to the host, and release those that were copied while it was computed.

        Args:
            blocks: the block on each micro-batch.
        """
        for block in self._leaving:
            self.copies.release(self._parked[id(block)])
            block.x = None  # it waits on the host
        self._leaving = []
        for block in blocks:
            if not block.is_saved:
                assert block.x is not None
                self._parked[id(block)] = self.copies.park(block.x)
                self._leaving.append(block)

    def before_backward(self, blocks: Sequence[CheckpointedBlock], following: Sequence[CheckpointedBlock]) -> None:
        """Bring a block's inputs back, and begin to fetch those of the next (empty: none)."""
        self._leaving = []  # those of the last block: being copied, still here, and needed now
        for block in blocks:
            if id(block) in self._parked:
                block.x = self.copies.fetch(self._parked.pop(id(block)))
        for block in following:
            if id(block) in self._parked:
                self.copies.begin_fetch(self._parked[id(block)])
