"""Do files rest on a disk, or in memory? On tmpfs and ramfs they take RAM that no process is told to hold."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")


@cache
def is_in_memory(folder: Path) -> bool:
    """Whether what is written into a folder, which need not be there yet, rests in RAM. False where nobody says."""
    import psutil

    place = Path(os.path.realpath(folder))
    try:
        mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    except (OSError, psutil.Error):
        return False
    return next((mounts[above] for above in (place, *place.parents) if above in mounts), "") in IN_MEMORY
