"""How much may a piece of a packed file become in memory? No more than there is room for; a few KiB can ask for gigabytes.

Parquet's pages and the buffers of packed Arrow batches say how large they are unpacked, right before the packed bytes, and a
reader takes that much memory at once. So these claims are read first (`parquet_pages`, `arrow_buffers`), and what asks for
too much is refused with its place. What a footer says of the same is not believed: nobody holds it against the pages.
"""

from __future__ import annotations

from data.sources.places import Place
from memory.observe.budget import host_limits
from settings.errors import UserError
from settings.fields import AUTO
from units import MIB, format_size

BESIDE = 300 * MIB  # the process that waits, and the one that reads
LEAST_ROOM = 96 * MIB  # less is asked for by what `xz -9` packs, and by pages as they are usually written
_budget: list[int | str] = [AUTO]  # of the run that this process works for


def keep_to(budget: int | str) -> None:
    """Let this process read what fits a run's budget from now on; "auto": what the machine has."""
    _budget[:] = [budget]


def memory_for(budget: int | str) -> int:
    """Bytes that a run with this budget may have in all, its children included."""
    lowest = min(limit.bytes for limit in host_limits())
    return lowest if budget == AUTO else min(lowest, int(budget))


def reading_room() -> int:
    """Bytes that reading one piece of a file may take."""
    return max(LEAST_ROOM, memory_for(*_budget) - BESIDE)


def fits(size: int) -> bool:
    """Whether there is room for so many bytes; small pieces are not worth a look at the machine."""
    return size <= LEAST_ROOM or size <= reading_room()


def check_unpacked(path: Place, where: str, size: int, takes: int) -> None:
    """Refuse a piece of a file that there is no room for.

    Args:
        where: of the file it is. size: bytes of it, unpacked. takes: bytes that reading it takes.
    Raises:
        UserError: there is none.
    """
    if not fits(takes):
        raise UserError(
            f"{path}: {where} unpacks to {format_size(size)}, reading it takes {format_size(takes)}, and there is room for "
            f"{format_size(reading_room())}; leave that row out or write the file anew with smaller pieces, or give --memory_budget more"
        )
