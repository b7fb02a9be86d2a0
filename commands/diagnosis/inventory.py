"""What this machine offers, and what limits it, as far as can be told without torch.

Idea: a machine's RAM is not what a run may take: control groups, address-space limits, other programs, swap that would
be used instead of an error, and CPU quotas stand in between. Each is read where the system keeps it; what a system does
not tell is None, never a guess.
Source: proc_meminfo(5), Linux admin-guide/cgroup-v2 (cpu.max) and the CFS bandwidth files of version 1.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from devices import processor
from devices.cores import core_quota, usable_cores
from devices.kernels import build
from language import say
from memory.observe.system_limits import host_limits, margin_of
from units import MIB

PACKAGES = ("torch", "accelerate", "pyarrow", "tokenizers", "safetensors", "numpy")
# variables that change how much memory or how many cores a run takes
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO",
    "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD",
)  # fmt: skip
LARGE_PROCESS_BYTES, SHOWN_PROCESSES = 512 * MIB, 3
DISK_SAMPLE_BYTES = 32 * MIB
ROOT = Path("/")


def take_inventory(folder: Path) -> dict[str, Any]:
    """Look at the machine: group of facts -> fact -> value, all of it plain for JSON. Sizes in bytes.

    Args:
        folder: where runs are written; its disk is measured. It need not exist.
    """
    return {
        "system": system_facts(),
        "memory": memory_facts(),
        "others": large_processes(),
        "disk": disk_facts(folder),
        "malloc": malloc_facts(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def system_facts(root: Path = ROOT) -> dict[str, Any]:
    """Platform, Python, processor, cores that this process may use, and the share of them that a quota leaves."""
    flags = processor.flags_of(root)
    kind, no_kernels = processor.here(root=root), build.why_impossible()
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
        "bf16_units": kind.name if flags and kind.multiplies_bf16_fast else None,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def memory_facts(root: Path = ROOT) -> dict[str, Any]:
    """RAM, swap, and every limit between the two and a run; the lowest one binds."""
    ram, swap = psutil.virtual_memory(), (0, 0)
    with suppress(OSError, RuntimeError):  # containers that hide /proc/vmstat; Windows without performance counters
        swap = psutil.swap_memory()[:2]
    limits = sorted(host_limits(root=root, pid=os.getpid()), key=lambda limit: limit.bytes)
    lowest = limits[0]
    return {
        "total_bytes": ram.total,
        "available_bytes": ram.available,
        "swap_total_bytes": swap[0],
        "swap_used_bytes": swap[1],
        "limits": [{"what": limit.what, "bytes": limit.bytes} for limit in limits],
        "binding": lowest.what,
        "budget_bytes": lowest.bytes - margin_of(lowest.bytes),
        "margin_bytes": margin_of(lowest.bytes),
    }


def large_processes() -> list[dict[str, Any]]:
    """Other programs that hold much memory, the largest first: pid, name, resident bytes."""
    own = {os.getpid(), os.getppid()}
    found = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        info = process.info["memory_info"]
        if info is not None and info.rss >= LARGE_PROCESS_BYTES and process.info["pid"] not in own:
            found.append({"pid": process.info["pid"], "name": process.info["name"] or "?", "bytes": info.rss})
    return sorted(found, key=lambda entry: -entry["bytes"])[:SHOWN_PROCESSES]


def malloc_facts() -> dict[str, Any]:
    """Which allocator serves tensors, and whether the user has set it."""
    library, version = platform.libc_ver() if sys.platform == "linux" else ("", "")
    preloaded = re.search(r"jemalloc|tcmalloc|mimalloc", os.environ.get("LD_PRELOAD", ""))
    return {
        "library": preloaded.group(0) if preloaded else f"{library} {version}".strip() or platform.system(),
        "is_glibc": library == "glibc" and preloaded is None,
        "set_by_user": sorted(name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"),
    }


def disk_facts(folder: Path) -> dict[str, Any]:
    """Free space where runs are written, and how fast that disk writes and reads, page cache left out.

    `read_rate` is None where the system gives no way around its page cache.
    """
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    facts: dict[str, Any] = {"folder": str(place), "free_bytes": shutil.disk_usage(place).free}
    facts |= {"write_rate": None, "read_rate": None}
    if facts["free_bytes"] > 4 * DISK_SAMPLE_BYTES:
        with suppress(OSError):  # a folder that cannot be written is reported by the run itself
            facts["write_rate"], facts["read_rate"] = _time_disk(place)
    return facts


def _time_disk(place: Path) -> tuple[float, float | None]:
    block = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=place) as file:
        began = time.perf_counter()
        for _ in range(DISK_SAMPLE_BYTES // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = DISK_SAMPLE_BYTES / (time.perf_counter() - began)
        if not _leave_page_cache(file.fileno()):
            return written, None
        file.seek(0)
        began = time.perf_counter()
        while file.read(MIB):
            pass
        return written, DISK_SAMPLE_BYTES / (time.perf_counter() - began)


def _leave_page_cache(handle: int) -> bool:
    """Make the next read come from the disk; False where the system cannot."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        return True
    try:
        import fcntl

        return fcntl.fcntl(handle, fcntl.F_NOCACHE, 1) != -1  # type: ignore[attr-defined,unused-ignore]  # macOS
    except (ImportError, AttributeError, OSError):
        return False


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
