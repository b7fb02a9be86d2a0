"""Prefetch: blocks' weights are loaded into a few buffers, and stored again, beside the computation.

Each buffer is as large as the largest block. One thread moves bytes, in the order in which it was asked to: while block
i computes, the next one is loaded (backward: block i, updated meanwhile, is stored when block i - 1 has been loaded and
its buffer is needed for i - 2). So two buffers do. Which block is next the caller knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from devices.copies import Wait
from engine.weight_offload.backends import OffloadBackend
from settings.errors import UserError, reason_of


def _already_done() -> Future[None]:
    future = Future[None]()
    future.set_result(None)
    return future


@dataclass(eq=False)
class Buffer:
    """Memory for one block.

    Args:
        memory: its bytes. block: number of the one that is in it, or on its way; None: none.
        used: how many use it now. is_changed: whether what is in it has to be stored.
        moved: the last move of its bytes that was asked for.
    """

    memory: Tensor
    block: int | None = None
    used: int = 0
    is_changed: bool = False
    moved: Future[None] = field(default_factory=_already_done, repr=False)


class PrefetchBuffers:
    """The buffers in front of a backend.

    Args:
        backend: where blocks are stored. sizes: bytes of each block.
        buffers: memory, each for the largest block; two or more. mark: says where the computation is (`Carrier.mark`).
    """

    def __init__(
        self, backend: OffloadBackend, sizes: Sequence[int], buffers: Sequence[Tensor], mark: Callable[[], Wait]
    ) -> None:
        self.backend = backend
        self.sizes = sizes
        self._mark = mark
        self._buffers = [Buffer(memory) for memory in buffers]  # The one used last stands at the end.
        self._stored_blocks: set[int] = set()  # Blocks that were stored once: others have nothing to load.
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.read_bytes = 0
        self.written_bytes = 0
        self.waited_seconds = 0.0  # Moving took so much longer than the computation beside it.

    def acquire(self, block: int) -> Tensor:
        """The bytes of a block, in memory until `release`.

        Raises:
            UserError: the disk failed.
        """
        buffer = self.prefetch(block)
        began = time.perf_counter()
        assert buffer is not None, "more blocks are in use at once than there are buffers"
        try:
            buffer.moved.result()
        except OSError as error:
            raise UserError(
                "--weights_in = file, the weights' file cannot be read or written: {reason}; continue from the last "
                "checkpoint with --is_keep_training=True, on another disk with --weights_dir",
                reason=reason_of(error),
            ) from error
        self.waited_seconds += time.perf_counter() - began
        buffer.used += 1
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer.memory[: self.sizes[block]]

    def release(self, block: int, is_changed: bool = False) -> bool:
        """One use less; returns whether it was the last.

        Args:
            is_changed: it is stored before its buffer takes another block.
        """
        buffer = next(buffer for buffer in self._buffers if buffer.block == block)
        assert buffer.used, "released without being used"
        buffer.used -= 1
        buffer.is_changed |= is_changed
        return buffer.used == 0

    def prefetch(self, block: int) -> Buffer | None:
        """Begin to load a block, unless it is there, into the free buffer whose use is the longest ago; None: none is
        free.
        """
        for buffer in self._buffers:
            if buffer.block == block:
                return buffer
        for buffer in self._buffers:
            if not buffer.used:
                self._replace(buffer, block)
                return buffer
        return None

    def _replace(self, buffer: Buffer, block: int) -> None:
        """Move bytes once the computation has come to where it is now, and after all moves before."""
        before = buffer.moved
        reached = self._mark()
        old = buffer.block if buffer.is_changed else None
        is_read = block in self._stored_blocks
        buffer.block = block
        buffer.is_changed = False
        if old is not None:
            self._stored_blocks.add(old)
            self.written_bytes += self.sizes[old]
        if is_read:
            self.read_bytes += self.sizes[block]

        def move() -> None:
            before.result()  # Done, as all before are; its error is this one's.
            reached()
            if old is not None:
                self.backend.store(old, buffer.memory[: self.sizes[old]])
            if is_read:
                self.backend.load(block, buffer.memory[: self.sizes[block]])

        buffer.moved = self._mover.submit(move)

    def close(self) -> None:
        """Stop moving; what is stored is lost."""
        self._mover.shutdown(wait=True, cancel_futures=True)
        self._buffers.clear()
        self.backend.close()
