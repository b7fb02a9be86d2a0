"""The class of this machine's processor, from its flags only, never from measured time.

Idea: what a run computes in, stores and keeps decides its numbers, so that it must come out the same on a quiet and on
a busy machine. The flags of the processor decide the class, the class has nominal rates, and the plan ranks by these.
`ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` lower the instruction set of torch's libraries: with either, this machine
counts as one of the lower class. Torch is not needed, so that `plan` without it reads the same.
Source: oneDNN "CPU Dispatcher Control"; proc_cpuinfo(5); rates: one thread, square products of side 1024.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FAST_FACTOR = 1.2  # A 16-bit product must beat fp32 by this much to be worth its rounding.
ROOT = Path("/")
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # The second is the older name of the first.
ISA_NAMES = re.compile(r"(DEFAULT|ALL|SSE41|AVX|AVX2|AVX2_VNNI|AVX2_VNNI_2|AVX512_CORE(_\w+)?|AVX10_\w+)\Z")
ATEN_NAMES = ("default", "avx2", "avx512")
ARM = ("arm64", "aarch64")
TORCH_QUESTIONS = {
    "avx512f": "_is_avx512_supported",
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx_tile": "_is_amx_tile_supported",
    "amx_bf16": "_is_amx_tile_supported",
}


@dataclass(frozen=True)
class Processor:
    """A class of processors, as far as products go.

    Args:
        name: of the class: one table of the benchmarks, one record of `memory.estimate.time`.
        instructions: those its products use, in words.
        float32, bfloat16: nominal FLOP/s of products on one core.
        is_measured: whether the rates were measured on such a processor; else they are a guess.
    """

    name: str
    instructions: str
    float32: float
    bfloat16: float
    is_measured: bool = True

    def rate(self, dtype: str, threads: int = 1) -> float:
        """Nominal FLOP/s of products in `dtype` on so many cores; 0 where nothing trains in it."""
        return threads * {"float32": self.float32, "bfloat16": self.bfloat16}.get(dtype, 0.0)

    def describe(self) -> str:
        return f"{self.name} ({self.instructions})"


AVX2 = Processor("fp32 products", "AVX2", 40e9, 0.75e9)
AVX512 = Processor("fp32 products", "AVX512", 75e9, 1.5e9)
AVX512_BF16 = Processor("avx512_bf16", "AVX512 with bf16 units", 80e9, 200e9)
AMX_BF16 = Processor("amx_bf16", "AMX tiles", 155e9, 1200e9)
ARM_BF16 = Processor("arm_bf16", "Arm with bf16 and i8mm", 30e9, 90e9, is_measured=False)
ARM_PLAIN = Processor("arm", "Arm without bf16 units", 20e9, 2e9, is_measured=False)
CLASSES = tuple(dict.fromkeys(p.name for p in (AVX2, AVX512, AVX512_BF16, AMX_BF16, ARM_BF16, ARM_PLAIN)))


def here(environ: Mapping[str, str] = os.environ, root: Path = ROOT, machine: str | None = None) -> Processor:
    """The class of this machine's processor.

    Args:
        environ, root: the process's own unless a test says otherwise. machine: as `platform.machine` names it.
    """
    flags = flags_of(root)
    if flags is None:  # Windows does not tell, but torch does where it is loaded.
        cpu = getattr(sys.modules.get("torch"), "cpu", None)
        flags = frozenset(flag for flag, question in TORCH_QUESTIONS.items() if getattr(cpu, question, bool)())
    return class_of(flags, environ, machine or platform.machine())


def class_of(flags: frozenset[str], environ: Mapping[str, str], machine: str) -> Processor:
    """The class of a processor with these flags, in an environment that may lower it."""
    if machine.lower() in ARM:
        return ARM_BF16 if {"bf16", "i8mm"} <= flags else ARM_PLAIN
    usable = flags - _lowered(environ)
    if "avx512f" not in usable:
        return AVX2
    if {"amx_tile", "amx_bf16"} <= usable:
        return AMX_BF16
    return AVX512_BF16 if "avx512_bf16" in usable else AVX512


def flags_of(root: Path = ROOT) -> frozenset[str] | None:
    """What the processor can do, in the kernel's words; None where the system does not tell."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo(root), re.MULTILINE)
    return None if match is None else frozenset(match.group(1).split())


def name_of(root: Path = ROOT) -> str:
    """The processor's name, as its maker gave it."""
    match = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(root), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def describe_here() -> str:
    """This processor's name and class: whose measured speeds are whose."""
    return f"{name_of()}, {here().describe()}"


def _lowered(environ: Mapping[str, str]) -> frozenset[str]:
    """Flags that the environment forbids. A word that the library does not know changes nothing there, nor here."""
    isa = next((environ[name].upper() for name in ISA_VARIABLES if environ.get(name)), "ALL")
    aten = environ.get("ATEN_CPU_CAPABILITY", "").lower()
    is_unknown = not ISA_NAMES.match(isa)
    has_512 = isa in ("ALL", "DEFAULT") or isa.startswith(("AVX512", "AVX10")) or is_unknown
    has_bf16 = has_512 and not isa.endswith(("_CORE", "_CORE_VNNI"))
    has_amx = has_512 and (isa in ("ALL", "DEFAULT") or "AMX" in isa or is_unknown)
    if aten in ATEN_NAMES and aten != "avx512":
        has_512 = has_bf16 = has_amx = False
    allowed = {"avx512f": has_512, "avx512_bf16": has_bf16, "amx_tile": has_amx}
    return frozenset(flag for flag, is_allowed in allowed.items() if not is_allowed)


def _cpuinfo(root: Path) -> str:
    try:
        return (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":  # A check tells on which processor it ran.
    print(f"processor: {describe_here()}")
