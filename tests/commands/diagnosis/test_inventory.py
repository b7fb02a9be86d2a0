"""The machine as its files tell it; other systems by what they lack."""

from __future__ import annotations

import json
import os
import platform
import types
from pathlib import Path

import psutil
import pytest

from commands.diagnosis import inventory
from commands.diagnosis.inventory import (
    disk_facts,
    large_processes,
    malloc_facts,
    memory_facts,
    system_facts,
    take_inventory,
)
from common.units import GIB, MIB
from devices import processor


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_is_told_in_plain_values(tmp_path: Path) -> None:
    facts = json.loads(json.dumps(take_inventory(tmp_path / "not" / "there")))
    assert facts["memory"]["total_bytes"] == psutil.virtual_memory().total
    assert 0 < facts["memory"]["budget_bytes"] < facts["memory"]["total_bytes"]
    assert facts["memory"]["binding"] == facts["memory"]["limits"][0]["what"]
    assert facts["system"]["cores"] >= 1 and facts["packages"]["torch"].startswith("2.")
    assert facts["disk"]["folder"] == str(tmp_path) and facts["disk"]["write_rate"] > 1e5
    assert list(tmp_path.iterdir()) == [], "the measurement leaves nothing"


def test_processor_and_its_units_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(
        tmp_path, proc__cpuinfo="model name\t: Xeon Test\nflags\t\t: avx2 avx512f avx512_bf16 amx_tile amx_bf16\n"
    )
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in (*processor.ISA_VARIABLES, "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    facts = system_facts(root)
    assert (facts["processor"], facts["class"]) == ("Xeon Test", "amx_bf16")


@pytest.mark.parametrize(
    ("group", "folder", "files", "quota"),
    [
        ("0::/app\n", "sys/fs/cgroup/app", {"cpu.max": "150000 100000\n"}, 1.5),
        (
            "4:cpu,cpuacct:/a\n",
            "sys/fs/cgroup/cpu/a",
            {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("", "none", {}, None),
    ],
)
def test_a_quota_of_cores_is_seen_in_both_versions(
    tmp_path: Path, group: str, folder: str, files: dict[str, str], quota: float | None
) -> None:
    (tmp_path / f"proc/{os.getpid()}").mkdir(parents=True)
    (tmp_path / f"proc/{os.getpid()}/cgroup").write_text(group)
    (tmp_path / folder).mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text)
    assert system_facts(tmp_path)["core_quota"] == quota


def test_the_lowest_limit_binds(tmp_path: Path) -> None:
    root = write(tmp_path, proc__meminfo=f"MemAvailable: {8 * GIB // 1024} kB\n")
    write(root, **{f"proc__{os.getpid()}__cgroup": "0::/box\n", "sys__fs__cgroup__box__memory.max": f"{2 * GIB}\n"})
    facts = memory_facts(root)
    assert facts["binding"] == "cgroup /box memory.max" and len(facts["limits"]) == 2
    assert facts["budget_bytes"] + facts["margin_bytes"] == 2 * GIB


def test_large_processes_are_named_largest_first_and_our_own_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(pid: int, size: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            info={"pid": pid, "name": f"p{pid}", "memory_info": types.SimpleNamespace(rss=size)}
        )

    hidden = types.SimpleNamespace(info={"pid": 5, "name": None, "memory_info": None})  # belongs to another user
    first, second, third = (10**7 + number for number in range(3))  # nobody's; 1 may be our own parent
    own = process(os.getpid(), 9 * GIB)
    running = [process(first, GIB), own, process(second, 10 * MIB), process(third, 3 * GIB), hidden]
    monkeypatch.setattr(psutil, "process_iter", lambda fields: running)
    assert [(entry["pid"], entry["bytes"]) for entry in large_processes()] == [(third, 3 * GIB), (first, GIB)]


def test_a_preloaded_allocator_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert malloc_facts() == {"library": "jemalloc", "is_glibc": False}
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not malloc_facts()["is_glibc"]


def test_without_a_way_around_the_page_cache_reading_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    facts = disk_facts(tmp_path)
    assert facts["read_rate"] is None and facts["write_rate"] > 1e5


def test_a_full_disk_is_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inventory.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=MIB))
    assert disk_facts(tmp_path) == {"folder": str(tmp_path), "free_bytes": MIB, "write_rate": None, "read_rate": None}


def test_swap_that_cannot_be_asked_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        raise OSError("no /proc/vmstat")

    monkeypatch.setattr(psutil, "swap_memory", hidden)
    assert memory_facts()["swap_total_bytes"] == 0
