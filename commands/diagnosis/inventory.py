"""What this machine offers and what limits it, as far as it can be read without torch.

Control groups, limits of the process, other programs, swap and CPU quotas stand between a machine's RAM and what a run
may take. Each is read where the system keeps it; what a system does not say is None, never a guess.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from devices import machine_file, processor
from devices.cores import core_quota, usable_cores
from devices.kernels import build
from memory.system_limits import host_limits, margin_of
from support.language import say
from support.units import MIB

PACKAGES = ("torch", "accelerate", "pyarrow", "tokenizers", "safetensors", "numpy")
# Variables that change how much memory or how many cores a run takes:
VARIABLES = re.compile(
    "OMP_NUM_THREADS|MKL_NUM_THREADS|CUDA_VISIBLE_DEVICES|PYTORCH_(CUDA_)?ALLOC_CONF|PYTORCH_ENABLE_MPS_FALLBACK"
    "|PYTORCH_MPS_(HIGH|LOW)_WATERMARK_RATIO|MALLOC_(ARENA_MAX|TRIM_THRESHOLD_|MMAP_THRESHOLD_)"
    "|GLIBC_TUNABLES|LD_PRELOAD"
)
LARGE_PROCESS_BYTES = 512 * MIB
SHOWN_PROCESSES = 3
DISK_SAMPLE_BYTES = 32 * MIB
ROOT = Path("/")


def take_inventory(folder: Path) -> dict[str, Any]:
    """Facts of this machine as plain values for JSON: group -> fact -> value, sizes in bytes.

    Args:
        folder: where runs are written; its disk is measured. It need not exist.
    """
    versions = {package: metadata.version(package) for package in PACKAGES if find_spec(package)}
    return {
        "system": system_facts(),
        "memory": memory_facts(),
        "others": large_processes(),
        "disk": disk_facts(folder),
        "malloc": malloc_facts(),
        "packages": versions,
        "environment": {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)},
    }


def system_facts(root: Path = ROOT) -> dict[str, Any]:
    """Platform, Python, processor, the cores that this process may use, and the share of them that a quota leaves."""
    kind = processor.here(root=root)
    no_kernels = build.why_impossible()
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": processor.name_of(root),
        "class": kind.name,
        "instructions": kind.instructions,
        "kernels": say("none: {reason}", reason=no_kernels)
        if no_kernels
        else say("by {compiler}", compiler=build.compiler_of(os.environ)),
        "cores": usable_cores(),
        "core_quota": core_quota(root),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def memory_facts(root: Path = ROOT) -> dict[str, Any]:
    """RAM, swap, and every limit of the memory that a run may take; the lowest limit binds."""
    ram = psutil.virtual_memory()
    swap = [0, 0]
    with suppress(OSError, RuntimeError):  # Containers may hide /proc/vmstat; Windows may have no performance counters.
        swap = list(psutil.swap_memory())
    limits = sorted(host_limits(root=root, pid=os.getpid()), key=lambda limit: limit.bytes)
    margin = margin_of(limits[0].bytes)
    return {
        "total_bytes": ram.total,
        "available_bytes": ram.available,
        "swap_total_bytes": swap[0],
        "swap_used_bytes": swap[1],
        "limits": [limit._asdict() for limit in limits],
        "binding": limits[0].what,
        "budget_bytes": limits[0].bytes - margin,
        "margin_bytes": margin,
    }


def large_processes() -> list[dict[str, Any]]:
    """Other programs that hold much memory, the largest first: pid, name, resident bytes."""
    own = (os.getpid(), os.getppid())
    processes = [
        {"pid": fact["pid"], "name": fact["name"] or "?", "bytes": fact["memory_info"].rss}
        for fact in (process.info for process in psutil.process_iter(["pid", "name", "memory_info"]))
        # There is no memory to read where the process belongs to another user.
        if fact["memory_info"] and fact["pid"] not in own and fact["memory_info"].rss >= LARGE_PROCESS_BYTES
    ]
    return sorted(processes, key=lambda process: -process["bytes"])[:SHOWN_PROCESSES]


def malloc_facts() -> dict[str, Any]:
    """Which allocator serves tensors; freed memory returns to the system only from glibc's."""
    preloaded = re.search(r"jemalloc|tcmalloc|mimalloc", os.environ.get("LD_PRELOAD", ""))
    if preloaded is not None:
        return {"library": preloaded[0], "is_glibc": False}
    library = " ".join(platform.libc_ver()).strip()
    return {"library": library or platform.system(), "is_glibc": library.startswith("glibc")}


def disk_facts(folder: Path) -> dict[str, Any]:
    """Free space where runs are written, and how fast that disk writes and reads without the page cache.

    The speeds are kept for estimates of time. `read_rate` is None where the system cannot leave its page cache out.
    """
    existing = folder.absolute()
    while not existing.is_dir():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    write_rate = None
    read_rate = None
    if free_bytes > 4 * DISK_SAMPLE_BYTES:
        # A run itself reports a folder that cannot be written.
        with suppress(OSError), tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            sample = os.urandom(DISK_SAMPLE_BYTES)
            start = time.perf_counter()
            file.write(sample)
            os.fsync(file.fileno())
            write_rate = DISK_SAMPLE_BYTES / (time.perf_counter() - start)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                start = time.perf_counter()
                file.read()
                read_rate = DISK_SAMPLE_BYTES / (time.perf_counter() - start)
    if write_rate and read_rate:
        machine_file.keep_disk(folder, read_rate, write_rate)
    return {"folder": str(existing), "free_bytes": free_bytes, "write_rate": write_rate, "read_rate": read_rate}
