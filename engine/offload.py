"""Where do the boundaries of the blocks wait between forward and backward: on the device, or in the machine's RAM?

A block that is run again needs only its input, the boundary; all boundaries together grow with the number of blocks. Each
is copied to the host while the next block computes, and comes back while the block above it goes backward, so that the
device holds those of three blocks, however many there are. Blocks that keep their graph keep their input with it.
Source: Rhu et al. 2016 (vDNN, arXiv 1602.08124), here on boundaries alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from devices.copies import HostCopies, Parked
from engine.keep import Visit


class Boundaries:
    """Boundaries stay where they are."""

    def begin(self) -> None:
        """A walk begins."""

    def after_forward(self, row: Sequence[Visit]) -> None:
        """All micro-batches have passed through a block."""

    def before_backward(self, row: Sequence[Visit], following: Sequence[Visit]) -> None:
        """A block is about to go backward, and `following` after it (empty: none)."""


class Offload(Boundaries):
    """Boundaries of blocks that are run again wait in the host's memory.

    Memory: on the device, the boundaries of three blocks; on the host, those of all, in slabs that stay.
    """

    def __init__(self, copies: HostCopies) -> None:
        self.copies = copies
        self._parked: dict[int, Parked] = {}  # id of a visit -> its boundary
        self._leaving: list[Visit] = []  # those whose copy may not have ended yet

    def begin(self) -> None:
        self.copies.settle()  # what a step that was broken off has left is freed behind it
        self._parked, self._leaving = {}, []

    def after_forward(self, row: Sequence[Visit]) -> None:
        """Send this block's boundaries out, and let go of those that were sent while it was computed."""
        self._let_go()
        for visit in row:
            if not visit.keep:
                assert visit.x is not None
                self._parked[id(visit)] = self.copies.park(visit.x)
                self._leaving.append(visit)

    def before_backward(self, row: Sequence[Visit], following: Sequence[Visit]) -> None:
        """Have this block's boundaries back, and ask for those of the next."""
        self._leaving = []  # those of the last block: on their way out, but still here, and needed now
        for visit in row:
            if id(visit) in self._parked:
                visit.x = self.copies.fetch(self._parked.pop(id(visit)))
        for visit in following:
            if id(visit) in self._parked:
                self.copies.begin_fetch(self._parked[id(visit)])

    def _let_go(self) -> None:
        for visit in self._leaving:
            self.copies.release(self._parked[id(visit)])
            visit.x = None  # it waits on the host
        self._leaving = []
