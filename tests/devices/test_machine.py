"""What is known of a machine without torch: its processor, its threads, its file of speeds, its variables, its
malloc.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devices import machine_file
from devices.cpu import CpuDevice
from devices.environment import HIGH, LOW, PRODUCT_CACHES, prepare_environment
from devices.machine_file import keep, read
from devices.malloc import TUNINGS
from devices.processor import (
    AMX_BF16,
    ARM_BF16,
    AVX2,
    AVX512,
    Processor,
    class_of,
)
from devices.sizes import MALLOCS
from memory.processes import has_proc

ROOT = Path(__file__).resolve().parent.parent.parent
BF16 = frozenset({"avx2", "fma", "avx512f", "avx512_bf16"})
AMX = BF16 | {"amx_tile", "amx_bf16"}
ARM = frozenset({"asimd", "bf16", "i8mm"})


@pytest.mark.parametrize(
    ("flags", "machine", "variables", "expected"),
    [
        (frozenset(), "x86_64", {}, AVX2),
        (AMX, "x86_64", {}, AMX_BF16),
        (ARM, "aarch64", {}, ARM_BF16),
        (AMX, "x86_64", {"DNNL_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, AVX512),
        (AMX, "x86_64", {"ONEDNN_MAX_CPU_ISA": "no such word"}, AMX_BF16),
        (AMX, "x86_64", {"ATEN_CPU_CAPABILITY": "avx2"}, AVX2),
    ],
)
def test_flags_decide_the_class_and_the_environment_lowers_it(
    flags: frozenset[str], machine: str, variables: dict[str, str], expected: Processor
) -> None:
    assert class_of(flags, variables, machine) == expected


# --- the file of speeds


@pytest.fixture
def speed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frugalt5" / "machine.json"


def test_speeds_are_kept_by_processor_and_scaled_by_threads(speed_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "multiply_rate", lambda self, dtype: 1e11)
    monkeypatch.setattr(CpuDevice, "threads", 2)
    assert CpuDevice().known_speed() is None
    measured = CpuDevice().measure()
    keep("cpu: b", "b", 1, {"float32": 2e11})
    assert CpuDevice().known_speed() == measured and len(measured.date) == 10
    assert measured.rates_with(4) == (("float32", 2e11), ("bfloat16", 2e11))
    monkeypatch.setattr(CpuDevice, "threads", 4)
    assert CpuDevice().known_speed() is None, "twice the threads are not twice as fast"
    assert machine_file.of_cpu(CpuDevice().computes_on, 4) == measured
    monkeypatch.setattr(CpuDevice, "computes_on", "another")
    assert CpuDevice().known_speed() is None, "a home may be shared between machines"
    assert [path.name for path in speed_file.parent.iterdir()] == ["machine.json"]


def test_a_broken_file_is_no_file_and_is_mended(speed_file: Path) -> None:
    speed_file.parent.mkdir(parents=True)
    no_rate = '{"cpu: a": {"processor": "a", "threads": 1, "rates": {"float32": NaN}, "date": ""}}'
    for text in ("", "[]", '{"cpu: a": 3}', no_rate):
        speed_file.write_text(text)
        assert read("cpu: a") is None
    keep("cpu: a", "a", 1, {"float32": 1e9})
    assert read("cpu: a") is not None


# --- variables that are set before torch is imported


def prepared(folder: Path, platform: str, torch_version: str = "2.13.0+cu130", **environ: str) -> dict[str, str]:
    prepare_environment(environ, platform, folder, torch_version)
    return environ


def test_what_is_missing_is_set_and_the_users_own_values_are_kept(tmp_path: Path) -> None:
    assert prepared(tmp_path, "win32")["ARROW_DEFAULT_MEMORY_POOL"] == "system"
    assert prepared(tmp_path, "linux", ARROW_DEFAULT_MEMORY_POOL="jemalloc")["ARROW_DEFAULT_MEMORY_POOL"] == "jemalloc"
    mac = prepared(tmp_path, "darwin")
    assert mac["PYTORCH_ENABLE_MPS_FALLBACK"] == "1" and (mac[HIGH], mac[LOW]) == ("0.8", "0.6")
    assert (
        "PYTORCH_ALLOC_CONF" not in prepared(tmp_path, "linux") and prepare_environment(mac, "darwin", tmp_path) == {}
    )


@pytest.mark.parametrize("driver", ["nvidiactl", "dxg"])
def test_blocks_of_any_length_share_a_range_on_cuda_whatever_torch_calls_that(tmp_path: Path, driver: str) -> None:
    """Under WSL2 there is dxg alone; torch 2.9 does not heed the new name."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / driver).touch()
    new = "PYTORCH_ALLOC_CONF"
    old = "PYTORCH_CUDA_ALLOC_CONF"
    for version, name, other in (("2.11.0", new, old), ("3.0", new, old), ("2.9.1+cu126", old, new)):
        environ = prepared(tmp_path, "linux", version)
        assert environ[name] == "expandable_segments:True" and other not in environ
    assert new not in prepared(tmp_path, "linux", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64")


def output_of(program: str, *arguments: str, folder: Path = ROOT, **environ: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name not in PRODUCT_CACHES}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**environment, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.stdout.split()


def test_a_mac_has_them_before_torch_is_imported(tmp_path: Path) -> None:
    """From the command line, on a platform that says it is a Mac, with a torch that prints what it finds."""
    (tmp_path / "torch.py").write_text(
        f"import os\nprint(os.environ.get('{HIGH}'), os.environ['PYTORCH_ENABLE_MPS_FALLBACK'], "
        f"flush=True)\nos._exit(0)\n"
    )
    program = (
        "import sys, psutil, sysconfig; sysconfig.get_config_vars(); sys.platform = 'darwin'; import "
        "train_low_mem; train_low_mem.main(sys.argv[1:])"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    (tmp_path / "text.txt").write_text("a few words\n\n" * 200)
    words = ("train", "--train_file=text.txt", "--tokenizer_type=byte", "--max_steps=1")
    words_found = output_of(program, *words, folder=tmp_path, PYTHONPATH=path, **{HIGH: "0.5"})
    assert words_found == ["0.5", "1"]


# --- malloc

PROGRAM = """
import os, sys
from devices.malloc import trim_malloc, tune_malloc
from memory.processes import usage_of

assert tune_malloc(sys.argv[1])
held = lambda: usage_of([os.getpid()]).anon_bytes
start = held()
blocks = [b"x" * 2**18 for _ in range(320)]
above = b"x" * 2**18  # holds the top of the heap, where malloc would trim by itself
full = held() - start
blocks.clear()
freed = held() - start
trim_malloc()
print(full, freed, held() - start)
"""
FOREIGN = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"}


@pytest.mark.skipif(not has_proc() or sys.platform != "linux", reason="no glibc or no /proc here")
@pytest.mark.parametrize("tuning", TUNINGS)
def test_small_returns_freed_blocks_at_once_and_the_others_when_trimmed(tuning: str) -> None:
    """Whatever the environment asks of malloc."""
    assert tuple(TUNINGS) == MALLOCS
    full, freed, trimmed = (int(word) / 2**20 for word in output_of(PROGRAM, tuning, PYTHONHASHSEED="0", **FOREIGN))
    assert full > 76 and trimmed < 8
    assert freed < 8 if tuning == "small" else freed > 16
