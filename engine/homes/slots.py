"""Where are a block's weights while it works, and how do they come and go beside the computation?

A few slots of memory, each as large as the largest block. One thread moves bytes, in the order in which it was asked to: a
block that was updated leaves its slot before another one comes into it, with no further bookkeeping, and while block i
computes, i + 1 comes (backward: block i + 1 goes home, block i - 1 comes). So two slots do. Which block comes next is
learnt from what came after the last two before, at first the neighbour in the direction of the way; a wrong guess costs
one reading and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from devices.copies import Wait
from engine.homes.places import Home
from settings.errors import UserError, reason_of


@dataclass(eq=False)
class Slot:
    """Memory for one piece.

    Args:
        room: its bytes. piece: number of what is in it, or on its way; None: nothing.
        used: how many use it now. moved: the last move of its bytes that was asked for.
    """

    room: Tensor
    piece: int | None = None
    used: int = 0
    moved: Future[None] | None = field(default=None, repr=False)


class Slots:
    """Brings pieces of a home and takes them back.

    Args:
        home: where they rest. pieces: first place and bytes of each, in the order of the way.
        rooms: memory, each for the largest piece; two or more. mark: tells where the computation is (`Carrier.mark`).
    """

    def __init__(
        self, home: Home, pieces: Sequence[tuple[int, int]], rooms: Sequence[Tensor], mark: Callable[[], Wait]
    ) -> None:
        self.home, self.pieces, self._mark = home, pieces, mark
        self._slots = [Slot(room) for room in rooms]  # the one used last stands at the end
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._way: tuple[int | None, int | None] = (None, None)  # the last two pieces
        self._after: dict[tuple[int | None, int | None], int] = {}
        self.read_bytes = self.written_bytes = 0
        self.waited_seconds = 0.0  # in `use`: what moving took longer than the computation beside it

    def use(self, piece: int) -> Tensor:
        """The bytes of a piece, here until `release`; and begin to bring the one that is likely next.

        Raises:
            UserError: the disk failed.
        """
        slot, began = self._bring(piece), time.perf_counter()
        _wait(slot)
        self.waited_seconds += time.perf_counter() - began
        slot.used += 1
        self._slots.remove(slot)
        self._slots.append(slot)
        self._follow(piece)
        return slot.room[: self.pieces[piece][1]]

    def release(self, piece: int) -> bool:
        """One use less; returns whether it was the last."""
        slot = self._slot_of(piece)
        assert slot is not None and slot.used, "released without being used"
        slot.used -= 1
        return slot.used == 0

    def keep(self, piece: int) -> None:
        """Begin to take a piece home, as it is now; it stays as it is until that is done, and may be read."""
        slot = self._slot_of(piece)
        assert slot is not None
        first, size = self.pieces[piece]
        self._move(slot, lambda: self.home.take(first, slot.room[:size]))
        self.written_bytes += size

    @contextmanager
    def putting(self, first: int, size: int) -> Iterator[Tensor]:
        """Memory to fill, whose bytes go to a place of the home when the context ends, whatever was there."""
        slot = self._free()
        slot.piece = None
        _wait(slot)
        slot.used += 1
        yield slot.room[:size]
        slot.used -= 1
        self._move(slot, lambda: self.home.take(first, slot.room[:size]))
        self.written_bytes += size
        self._slots.remove(slot)
        self._slots.append(slot)

    def close(self) -> None:
        """Stop moving; what is at home is lost with it."""
        self._mover.shutdown(wait=True, cancel_futures=True)
        self._slots.clear()
        self.home.close()

    def _bring(self, piece: int) -> Slot:
        slot = self._slot_of(piece)
        if slot is None:
            slot, (first, size) = self._free(), self.pieces[piece]
            room = slot.room[:size]
            slot.piece = piece
            self._move(slot, lambda: self.home.bring(first, room))
            self.read_bytes += size
        return slot

    def _slot_of(self, piece: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.piece == piece), None)

    def _free(self) -> Slot:
        free = next((slot for slot in self._slots if not slot.used), None)
        assert free is not None, "more blocks are in use at once than there are slots"
        return free

    def _move(self, slot: Slot, move: Callable[[], None]) -> None:
        """Move bytes once the computation has come to where it is told to be now, and after all moves before."""
        before, reached = slot.moved, self._mark()

        def moving() -> None:
            if before is not None:
                before.result()  # done, as all before are; its error is this one's
            reached()
            move()

        slot.moved = self._mover.submit(moving)

    def _follow(self, piece: int) -> None:
        """Note what came after what, and bring what is likely next where a slot is free."""
        if piece != self._way[1]:
            self._after[self._way] = piece
            self._way = (self._way[1], piece)
        before = self._way[0]
        neighbour = piece - 1 if before is not None and before > piece else piece + 1
        likely = self._after.get(self._way, neighbour)
        if 0 <= likely < len(self.pieces) and not all(slot.used for slot in self._slots):
            self._bring(likely)


def _wait(slot: Slot) -> None:
    if slot.moved is None:
        return
    try:
        slot.moved.result()
    except OSError as error:
        raise UserError(
            f"--weights_in = file, the weights' file cannot be read or written: {reason_of(error)}; continue from the "
            "last checkpoint with --is_keep_training=True, on another disk with --weights_dir"
        ) from error
