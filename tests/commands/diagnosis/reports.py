"""A report of `doctor` on a healthy machine; tests change the facts that they are about."""

from __future__ import annotations

from typing import Any

GIB = 2**30
CPU = {
    "name": "cpu",
    "missing": "",
    "about": "CPU, 4 threads",
    "is_separate_memory": False,
    "total_bytes": 0,
    "free_bytes": 0,
    "rates": {"float32": 1.5e11, "bfloat16": 1.2e12, "float16": 3e9},
    "copy_rate": 2e10,
    "compute": "bfloat16",
    "class": "amx_bf16",
}
GPU = {
    **CPU,
    "name": "cuda",
    "about": "cuda:0 (NVIDIA Test)",
    "is_separate_memory": True,
    "total_bytes": 24 * GIB,
    "free_bytes": 20 * GIB,
    "rates": {"float32": 3e13, "bfloat16": 1.2e14, "float16": 1.2e14},
    "copy_rate": 9e11,
    "class": "cuda",
}
NO_GPU = {"name": "cuda", "missing": "this build of torch has no CUDA"}


def report(**changes: Any) -> dict[str, Any]:
    """The whole report; `changes` replace facts, written group__fact=value or group=value."""
    machine: dict[str, Any] = {
        "system": {
            "platform": "Linux 6.1 x86_64",
            "python": "3.12.1",
            "processor": "Test CPU",
            "class": "amx_bf16",
            "instructions": "AMX tiles",
            "kernels": "by /usr/bin/gcc",
            "cores": 4,
            "core_quota": None,
            "load": 0.1,
        },
        "memory": {
            "total_bytes": 16 * GIB,
            "available_bytes": 12 * GIB,
            "swap_total_bytes": 2 * GIB,
            "swap_used_bytes": 0,
            "limits": [{"what": "available RAM", "bytes": 12 * GIB}],
            "binding": "available RAM",
            "budget_bytes": 11 * GIB,
            "margin_bytes": GIB,
        },
        "others": [],
        "disk": {"folder": "/data", "free_bytes": 500 * GIB, "write_rate": 1e9, "read_rate": 2e9},
        "malloc": {"library": "glibc 2.36", "is_glibc": True},
        "packages": {"torch": "2.13.0", "pyarrow": "26.0"},
        "environment": {},
    }
    torch = {
        "version": "2.13.0",
        "cuda": None,
        "hip": None,
        "cpu_capability": "AVX512",
        "mkl": True,
        "onednn": True,
        "threads": 4,
        "mac": None,
    }
    whole: dict[str, Any] = {"machine": machine, "torch": torch, "devices": [CPU], "problem": "", "model": None}
    for name, value in changes.items():
        group, _, fact = name.partition("__")
        parent = machine if group in machine else whole
        parent[group] = {**parent[group], fact: value} if fact else value
    return whole


def model(planned: str = "", measured: str = "", peak_bytes: int = GIB) -> dict[str, Any]:
    """A model with one case; `planned` and `measured` are what is said of a case that does not fit, and of a step that
    fails.
    """
    case = {"kind": "LoRA rank", "label": "4", "load_bytes": GIB // 2, "peak_bytes": GIB, "seconds": 1.0}
    return {
        "name": "t5-small",
        "budget_bytes": 2 * GIB,
        "planned": [{**case, "outcome": planned}],
        "measured": {**case, "outcome": measured, "peak_bytes": peak_bytes, "predicted_bytes": GIB},
    }
