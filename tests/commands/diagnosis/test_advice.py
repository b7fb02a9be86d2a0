"""Every sentence has its fact: it is there with it, and away without it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from commands.diagnosis.advice import advice_for
from settings.declared import settings_by_name
from tests.commands.diagnosis.reports import CPU, GIB, GPU, model, report

BUSY = {"pid": 77, "name": "browser", "bytes": 6 * GIB}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a container": (
        {"memory__binding": "cgroup /docker/ab memory.max", "memory__budget_bytes": 2 * GIB},
        ("cgroup /docker/ab memory.max limits this process", "2.00 GiB", "kills"),
    ),
    "swap in use": ({"memory__swap_used_bytes": GIB}, ("1.00 GiB of swap is in use",)),
    "no swap": ({"memory__swap_total_bytes": 0}, ("there is no swap",)),
    "another program": ({"others": [BUSY]}, ("browser (process 77) uses 6.00 GiB",)),
    "a quota": ({"system__core_quota": 2.0}, ("a CPU quota allows 2 of 4 cores", "--num_threads=2")),
    "few threads": ({"torch__threads": 1}, ("torch uses 1 of 4 cores", "--num_threads=4")),
    "a busy machine": ({"system__load": 9.0}, ("load 9 on 4 cores",)),
    "no bf16 units": (
        {"devices": [{**CPU, "compute": "float32"}]},
        ("no fast bf16 units", "--mixed_precision=bf16"),
    ),
    "a full disk": ({"disk__free_bytes": GIB}, ("/data has 1.00 GiB free", "--output_dir")),
    "a slow disk": ({"disk__read_rate": 2e7}, ("the disk reads", "--cache_dir")),
    "Rosetta": ({"torch__mac": "rosetta"}, ("Rosetta", "arm64 Python")),
    "torch without MPS": (
        {"torch__mac": "apple_silicon", "devices": [{"name": "mps", "missing": "this build of torch has no MPS"}, CPU]},
        ("no MPS: install",),
    ),
    "fragments": (
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}},
        ("without expandable_segments:True",),
    ),
    "a GPU in use": (
        {"devices": [{**GPU, "free_bytes": 8 * GIB}, CPU]},
        ("other processes use 16.00 GiB of cuda:0 (NVIDIA Test)",),
    ),
    "torch is broken": ({"problem": "ImportError: no", "devices": []}, ("torch cannot be used: ImportError: no",)),
    "a case that does not fit": ({"model": model("does not fit: more")}, ("does not fit: LoRA rank 4; `plan`",)),
    "a killed step": ({"model": model(measured="killed for its memory")}, ("the step failed (killed for its memory)",)),
    "too low": ({"model": model(peak_bytes=2 * GIB)}, ("100% too low", "--memory_budget")),
    "as predicted": ({"model": model()}, ("the prediction held: the measured peak differs by +0%",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fact_has_its_sentence(name: str) -> None:
    changes, words = CASES[name]
    said = advice_for(report(**changes))
    assert all(any(word in sentence for sentence in said) for word in words), said
    healthy = " ".join(advice_for(report()))
    assert not any(word in healthy for word in words)


def test_a_healthy_machine_needs_no_advice() -> None:
    assert advice_for(report()) == [] and advice_for(report(devices=[GPU, CPU])) == []


def test_every_flag_that_is_named_exists() -> None:
    said = " ".join(sentence for changes, _ in CASES.values() for sentence in advice_for(report(**changes)))
    flags = set(re.findall(r"--([a-z_]+)", said))
    assert flags and flags <= set(settings_by_name())
