"""An NVIDIA (or ROCm) GPU as a device: a thin layer over torch.cuda.

- Figures are of what the caching allocator has reserved, since other programs cannot use that; the context of CUDA
  itself (some 400 MiB) is never ours to count, and free memory is told without it.
- A budget is a hard limit: the allocator refuses what goes beyond it, and the error is handled where a plan can shrink.
- bf16 where the card has it (Ampere on); else fp16 where it has tensor cores (Volta, Turing but GTX 16), with a loss
  scale; TF32 is fp32's fast form, unless the user asks for fp32 itself.
Source: PyTorch notes "CUDA semantics" (memory management, TF32, pinned buffers).
"""

from __future__ import annotations

import re

import torch

from devices.base import Device
from devices.copies import Carrier, CudaCarrier
from devices.torch_compiler import why_not_for_gpu
from support.language import join, say
from support.units import KIB, MIB

COMPILED_CAPABILITY = (7, 0)  # Triton compiles for cards from Volta on.
FP16_CAPABILITY = (7, 0)  # Volta was the first with tensor cores.
# Turing's smaller chips (TU116, TU117) have none, but the same capability. Source: NVIDIA's data sheets of these cards.
NO_TENSOR_CORES = re.compile(r"GTX 16|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")
OLD_CARDS = (
    "builds for CUDA 12.6 have them for cards from Maxwell on, up to torch 2.14: pip install torch --index-url "
    "https://download.pytorch.org/whl/cu126"
)
# First capability -> nominal FLOP/s of large products on one multiprocessor: fp32 (TF32 where the card has it), 16
# bits. They rank ways to run, and are a guess from what such cards are known to reach; speeds for people are measured.
MULTIPROCESSOR_RATES = {
    (0, 0): (0.1e12, 0.1e12),
    (7, 0): (0.16e12, 0.9e12),
    (8, 0): (1.0e12, 2.2e12),
    (8, 6): (0.4e12, 0.9e12),
    (9, 0): (2.8e12, 5.0e12),
}


def workspace_bytes(capability: tuple[int, int], is_rocm: bool = False) -> int:
    """What torch holds for the products of one thread, among its tensors. Measured on an H100 and an H200.

    Source: `parseChosenWorkspaceSize` in torch's CUDABlas; on ROCm the capability is the number of the architecture.
    """
    if is_rocm and capability in ((9, 4), (9, 5)):
        return 128 * MIB
    if is_rocm or capability >= (9, 0):
        return 32 * MIB
    return 2 * 4096 * KIB + 8 * 16 * KIB


def why_no_kernels(index: int) -> str:
    """Why this build of torch computes nothing on a card, though it finds it; empty where it does.

    Machine code serves the later cards of its own generation, PTX every later one. Source: torch.cuda._check_cubins.
    """
    capability = torch.cuda.get_device_capability(index)
    # The architectures of ROCm have other names, so that nothing is found there.
    architectures = re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(torch.cuda.get_arch_list()))
    if not architectures:
        return ""
    for kind, major, minor, suffix in architectures:
        built_for = (int(major), int(minor))
        is_served = built_for == capability if suffix == "a" else built_for <= capability
        if is_served and (kind == "compute" or built_for[0] == capability[0]):
            return ""
    return say(
        "torch {version} has no kernels for {device} (compute capability {major}.{minor}, it has {value}); {old_cards}",
        version=torch.__version__,
        device=torch.cuda.get_device_name(index),
        major=capability[0],
        minor=capability[1],
        value=join(", ", sorted({f"{major}.{minor}" for _, major, minor, _ in architectures})),
        old_cards=OLD_CARDS,
    )


class CudaDevice(Device):
    """One GPU.

    Args:
        index: its number among the visible ones, from 0.
    """

    name = "cuda"
    is_separate_memory = overlaps_copies = reuses_cache = True
    largest_side = 4096  # Smaller products do not fill the multiprocessors.
    speed_class = "cuda"
    threads = 1
    out_of_memory_words = (
        "cuda out of memory",
        "hip out of memory",
        "cuda error: out of memory",
        "cuda driver error: out of memory",
        "hip error: out of memory",
        "cublas_status_alloc_failed",
        "cudnn_status_alloc_failed",
        "cusolver_status_alloc_failed",
    )

    def __init__(self, index: int = 0) -> None:
        super().__init__(torch.device("cuda", index))
        if reason := why_no_kernels(index):  # `why_missing` has looked at the first card alone.
            raise RuntimeError(reason)
        torch.cuda.set_device(self.torch_device)

    @classmethod
    def why_missing(cls) -> str:
        if not torch.backends.cuda.is_built() and torch.version.hip is None:
            return say("this build of torch has no CUDA")
        if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
            return say("torch finds no CUDA driver or GPU")
        return why_no_kernels(0)

    @classmethod
    def count(cls) -> int:
        return torch.cuda.device_count()

    def describe(self) -> str:
        return f"{self.torch_device} ({torch.cuda.get_device_name(self.torch_device)})"

    def memory_now_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.torch_device)

    def memory_idle_bytes(self) -> int:
        return self.memory_now_bytes() - torch.cuda.memory_allocated(self.torch_device)

    def memory_peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def memory_total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def memory_free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0] + self.memory_idle_bytes()

    def pinned_bytes(self) -> int:
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))

    def limit_memory(self, limit_bytes: int) -> bool:
        share = min(1.0, limit_bytes / self.memory_total_bytes())
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)
        return True

    def cleanup(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    @property
    def computes_on(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    @property
    def rated_dtypes(self) -> tuple[torch.dtype, ...]:
        both = (torch.float32, torch.bfloat16)
        return (*both, torch.float16) if self.multiplies_fp16() else both

    def nominal_rate(self, dtype: torch.dtype) -> float:
        capability = torch.cuda.get_device_capability(self.torch_device)
        wide, narrow = MULTIPROCESSOR_RATES[max(first for first in MULTIPROCESSOR_RATES if first <= capability)]
        is_fast = {torch.bfloat16: torch.bfloat16 in self.fast_dtypes(), torch.float16: self.multiplies_fp16()}
        rate = narrow if is_fast.get(dtype) else wide
        return rate * torch.cuda.get_device_properties(self.torch_device).multi_processor_count

    def why_not_compiling(self) -> str:
        if torch.version.hip is not None:
            return say("torch compiles for NVIDIA GPUs and processors only")
        if torch.cuda.get_device_capability(self.torch_device) < COMPILED_CAPABILITY:
            return say("torch compiles for GPUs from Volta on")
        return why_not_for_gpu()

    def multiplies_fp16(self) -> bool:
        has_cores = torch.cuda.get_device_capability(self.torch_device) >= FP16_CAPABILITY
        return torch.version.hip is not None or (has_cores and not NO_TENSOR_CORES.search(self.computes_on))

    @property
    def library_bytes(self) -> int:
        # Two threads multiply: the main one and that of backward.
        capability = torch.cuda.get_device_capability(self.torch_device)
        return 2 * workspace_bytes(capability, is_rocm=torch.version.hip is not None)

    def set_exact_fp32(self, exact: bool) -> None:
        torch.set_float32_matmul_precision("highest" if exact else "high")  # High is TF32, from Ampere on.

    def carrier(self) -> Carrier:
        return CudaCarrier(self.torch_device)

    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        # Asked, not measured: the first product would load the whole of cuBLAS before the plan is made.
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return (torch.bfloat16, torch.float32)
        return (torch.float16, torch.float32) if self.multiplies_fp16() else (torch.float32,)
