"""The class of a processor follows from its flags and from what the environment allows, and from nothing else; so do threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices import processor
from devices.cores import computing_threads, usable_cores
from devices.processor import (
    AMX_BF16,
    ARM_BF16,
    ARM_PLAIN,
    AVX2,
    AVX512,
    AVX512_BF16,
    CLASSES,
    Processor,
    class_of,
    here,
    name_of,
)
from settings.fields import AUTO

OLD = frozenset({"avx2", "fma"})
WIDE = OLD | {"avx512f", "avx512bw"}
BF16 = WIDE | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_bf16"}
ARMS = frozenset({"asimd", "bf16", "i8mm"})


@pytest.mark.parametrize(
    ("flags", "machine", "expected"),
    [
        (OLD, "x86_64", AVX2),
        (WIDE, "x86_64", AVX512),
        (BF16, "AMD64", AVX512_BF16),
        (AMX, "x86_64", AMX_BF16),
        (AMX - {"amx_bf16"}, "x86_64", AVX512_BF16),
        (OLD | {"avx512_bf16"}, "x86_64", AVX2),
        (frozenset(), "x86_64", AVX2),
        (ARMS, "aarch64", ARM_BF16),
        (ARMS - {"i8mm"}, "aarch64", ARM_PLAIN),
        (frozenset(), "arm64", ARM_PLAIN),
    ],
)
def test_flags_decide_the_class(flags: frozenset[str], machine: str, expected: Processor) -> None:
    assert class_of(flags, {}, machine) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, AVX2),
        ({"ONEDNN_MAX_CPU_ISA": "avx2_vnni_2"}, AVX2),
        ({"DNNL_MAX_CPU_ISA": "SSE41"}, AVX2),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, AVX512),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, AVX512),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, AVX512_BF16),
        ({"ONEDNN_MAX_CPU_ISA": "AVX10_1_512"}, AVX512_BF16),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, AMX_BF16),
        ({"ONEDNN_MAX_CPU_ISA": "AVX10_1_512_AMX_FP16"}, AMX_BF16),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, AMX_BF16),
        ({"ONEDNN_MAX_CPU_ISA": "no such word"}, AMX_BF16),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, AVX2),
        ({"ATEN_CPU_CAPABILITY": "default"}, AVX2),
        ({"ATEN_CPU_CAPABILITY": "avx512"}, AMX_BF16),
        ({"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX2"}, AVX2),
        ({}, AMX_BF16),
    ],
)
def test_the_environment_lowers_it(variables: dict[str, str], expected: Processor) -> None:
    assert class_of(AMX, variables, "x86_64") == expected
    assert class_of(OLD, variables, "x86_64") == AVX2, "nothing raises it"


def test_the_kernel_is_asked(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    file = tmp_path / "proc/cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: fpu avx2 avx512f avx512_bf16\n")
    assert here({}, tmp_path, "x86_64") == AVX512_BF16 and name_of(tmp_path) == "Test CPU"
    assert here({"ONEDNN_MAX_CPU_ISA": "AVX2"}, tmp_path, "x86_64") == AVX2
    file.write_text("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n")
    assert here({}, tmp_path, "aarch64") == ARM_BF16


def test_where_the_system_does_not_tell_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name, has in (
        ("_is_avx512_supported", True),
        ("_is_avx512_bf16_supported", True),
        ("_is_amx_tile_supported", False),
    ):
        monkeypatch.setattr(torch.cpu, name, lambda has=has: has, raising=False)
    assert here({}, tmp_path, "AMD64") == AVX512_BF16
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert here({}, tmp_path, "AMD64") == AVX512
    monkeypatch.delitem(processor.sys.modules, "torch")
    assert here({}, tmp_path, "AMD64") == AVX2


def test_bf16_products_are_fast_where_there_are_units_for_them() -> None:
    fast = {
        kind.name for kind in (AVX2, AVX512, AVX512_BF16, AMX_BF16, ARM_BF16, ARM_PLAIN) if kind.multiplies_bf16_fast
    }
    assert fast == {"avx512_bf16", "amx_bf16", "arm_bf16"}
    assert AVX2.rate("float32", 4) == 4 * AVX2.float32 and AVX2.rate("float16") == 0
    assert CLASSES == ("fp32 products", "avx512_bf16", "amx_bf16", "arm_bf16", "arm")


@pytest.mark.parametrize("said, threads", [("3", 3), ("5,2", 5)])
def test_the_environment_says(said: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert computing_threads(AUTO) == threads
    assert computing_threads(7) == 7, "what is asked for comes first"


@pytest.mark.parametrize("said", ["", "0", "many"])
def test_else_a_thread_for_each_real_core(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    for real, threads in ((1, 1), (1000, usable_cores()), (None, usable_cores())):
        monkeypatch.setattr("psutil.cpu_count", lambda logical, real=real: real)
        assert computing_threads() == threads
