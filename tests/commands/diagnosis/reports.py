"""A report of `doctor` as a healthy machine gives it; tests change what they are about."""

from __future__ import annotations

from typing import Any

GIB = 2**30
CPU = {
    "name": "cpu", "missing": "", "about": "CPU, 4 threads", "is_separate_memory": False, "total_bytes": 0, "free_bytes": 0,
    "rates": {"float32": 1.5e11, "bfloat16": 1.2e12, "float16": 3e9}, "copy_rate": 2e10, "compute": "bfloat16", "reason": "",
    "class": "amx_bf16", "nominal": {"float32": 1e11, "bfloat16": 1e12}, "measured": "2026-01-01",
    "multiplies_fp16": False, "copies_beside": False,
}  # fmt: skip
GPU = {
    **CPU, "name": "cuda", "about": "cuda:0 (NVIDIA Test)", "is_separate_memory": True, "total_bytes": 24 * GIB,
    "free_bytes": 20 * GIB, "rates": {"float32": 3e13, "bfloat16": 1.2e14, "float16": 1.2e14}, "copy_rate": 9e11,
    "class": "cuda", "nominal": {"float32": 4e13, "bfloat16": 9e13, "float16": 9e13},
    "multiplies_fp16": True, "copies_beside": True,
}  # fmt: skip
NO_GPU = {"name": "cuda", "missing": "this build of torch has no CUDA"}


def report(**changes: Any) -> dict[str, Any]:
    """The whole report; `changes` replace facts, written group__fact=value or group=value."""
    machine: dict[str, Any] = {
        "system": {
            "platform": "Linux 6.1 x86_64", "python": "3.12.1", "processor": "Test CPU", "cores": 4, "core_quota": None,
            "class": "amx_bf16", "instructions": "AMX tiles", "kernels": "by /usr/bin/gcc", "bf16_units": "amx_bf16", "load": 0.1,
        },
        "memory": {
            "total_bytes": 16 * GIB, "available_bytes": 12 * GIB, "swap_total_bytes": 2 * GIB, "swap_used_bytes": 0,
            "limits": [{"what": "available RAM", "bytes": 12 * GIB}], "binding": "available RAM", "budget_bytes": 11 * GIB,
            "margin_bytes": GIB,
        },
        "others": [],
        "disk": {"folder": "/data", "free_bytes": 500 * GIB, "write_rate": 1e9, "read_rate": 2e9},
        "malloc": {"library": "glibc 2.36", "is_glibc": True, "set_by_user": []},
        "packages": {"torch": "2.13.0", "pyarrow": "26.0"},
        "environment": {},
    }  # fmt: skip
    torch = {
        "version": "2.13.0", "cuda": None, "hip": None, "cpu_capability": "AVX512", "mkl": True, "onednn": True, "threads": 4,
        "mac": None,
    }  # fmt: skip
    whole: dict[str, Any] = {
        "machine": machine,
        "torch": torch,
        "devices": [CPU],
        "problem": "",
        "trials": [],
        "advice": [],
    }
    for name, value in changes.items():
        group, _, fact = name.partition("__")
        place = machine if group in machine else whole
        place[group] = {**place[group], fact: value} if fact else value
    return whole


def trial(kind: str = "LoRA rank", label: str = "4", **changes: Any) -> dict[str, Any]:
    """A trial that went as predicted."""
    plain = {
        "kind": kind, "label": label, "predicted_bytes": GIB, "measured_bytes": GIB, "predicted_seconds": 1.0, "seconds": 2.0,
        "tokens": 1000, "outcome": "",
    }  # fmt: skip
    return {**plain, **changes}
