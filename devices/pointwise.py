"""Stochastic rounding as one GPU kernel, compiled at first use by the compiler inside torch.

That compiler is jiterator on CUDA and ROCm (NVRTC or hiprtc, part of every build of torch) and Metal's on a Mac. The
random numbers come from a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
with the mixing of splitmix64, Steele et al. 2014): word w of a key is the hash of key + (w + 1) GOLDEN, 64 bits that
serve four elements.

Operations of torch compute the same bits on a CPU without C kernels, for sizes that do not fill words, and where
compiling fails. On meta tensors the kernel is one operation, `frugalt5::round_randomly`, which is how
`benchmarks.traced` counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from devices.base import traits_of
from settings.program import IS_INSTALLED

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
# A process may import a checkout's modules by their plain names and below the package, and torch takes a namespace
# once.
NAMESPACE = "frugalt5_package" if IS_INSTALLED else "frugalt5"

# The kernel, in what C++ and Metal share. WORD: unsigned, 64 bits.

HASH = """
template <typename T> WORD mixed(T key) {
    WORD bits = (WORD)key;
    bits = (bits ^ (bits >> 30)) * (WORD)0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * (WORD)0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}
template <typename T> WORD random_word(T key, T number) {
    return mixed<WORD>((WORD)key + ((WORD)number + 1) * (WORD)0x9E3779B97F4A7C15u);
}
"""
ROUND = """
template <typename T> T round_randomly(T low, T high, T key, T row, T column) {
    WORD random = random_word<T>(key, row + column), rounded = 0;
    for (int lane = 0; lane < 4; lane++) {
        unsigned int bits = (unsigned int)((WORD)(lane < 2 ? low : high) >> (32 * (lane % 2)));
        unsigned int noise = (unsigned int)(random >> (16 * lane)) & 0xFFFFu;
        if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
            bits = 0x7FC00000u;
        else
            bits = bits + noise;
        rounded = rounded | ((WORD)(bits >> 16) << (16 * lane));
    }
    return (T)rounded;
}
"""
METAL_ENTRY = """
kernel void round_all(
    device long *out, device const long *values, device const long *keys, constant long &width,
    uint2 at [[thread_position_in_grid]]) {
    const ulong place = (ulong)at.y * (ulong)width + at.x;
    out[place] = round_randomly<long>(values[2 * place], values[2 * place + 1], keys[at.y], (long)at.x, 0);
}
"""


def source_of(is_metal: bool = False) -> str:
    """The text of the kernel."""
    text = HASH + ROUND
    if is_metal:
        return f"#include <metal_stdlib>\nusing namespace metal;\n{text.replace('WORD', 'ulong')}{METAL_ENTRY}"
    return text.replace("WORD", "unsigned long long")


# --- by operations of torch


def mix_by_torch(state: Tensor) -> Tensor:
    """Hash int64 numbers; overwrites and returns `state`."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        state ^= _logical_shift(state, shift)
        state *= factor
    state ^= _logical_shift(state, 31)
    return state


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros; torch's own shift copies the sign, which would bias the highest word."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def random_words(keys: Tensor, count: int) -> Tensor:
    """Draw `count` 16-bit random numbers for each key.

    Args:
        keys: (...) int64.
    Returns:
        (..., count) int16, uniform.
    Memory: 8 bytes for every 4 numbers, twice.
    """
    counters = torch.arange(1, (count + 3) // 4 + 1, device=keys.device) * GOLDEN
    return mix_by_torch(keys.unsqueeze(-1) + counters).view(torch.int16)[..., :count]


def round_by_torch(values: Tensor, noise: Tensor) -> Tensor:
    """fp32, overwritten, to bf16, after int16 `noise` of the same shape was added below its last bit; NaN stays NaN."""
    no_number = values != values  # The noise would carry some of these over into 0.
    bits = values.view(torch.int32)
    bits += noise.to(torch.int32).bitwise_and_(0xFFFF)
    bits &= -65536
    return values.to(torch.bfloat16).masked_fill_(no_number, torch.nan)


def _round_by_torch(values: Tensor, keys: Tensor, *places: Tensor) -> Tensor:
    return round_by_torch(values.clone(), random_words(keys, values[0].numel()).view(values.shape))


# --- as one kernel


def is_compiled(device: torch.device) -> bool:
    """Whether a device of this kind rounds in one kernel, which compiled."""
    return traits_of(device).has_compiler and not _why_not(device.type)


def round_in_one_kernel(values: Tensor, keys: Tensor) -> Tensor:
    """Round (count, n, m) fp32 to bf16 by the keys (count,), m being a multiple of four.

    Calling a Python function through torch's dispatcher would take 20 us.
    """
    rows, columns = places_of_words(values.shape[1], values.shape[2] // 4, values.device)
    compute = _KERNELS.get(values.device.type, getattr(torch.ops, NAMESPACE).round_randomly.default)
    rounded: Tensor = compute(values, keys, rows, columns)
    return rounded


def fills_words(values: Tensor) -> bool:
    """Whether the numbers of fp32 values (..., m) can be read as words of 64 bits, four of them for two words."""
    return values.is_contiguous() and values.shape[-1] % 4 == 0 and values.storage_offset() % 2 == 0


def why_no_rounding_kernel(device: torch.device) -> str:
    """Why there is no kernel for rounding on a device that should have one; empty if there is one. Compiles it."""
    return _why_not(device.type) if traits_of(device).has_compiler else ""


@lru_cache(maxsize=64)
def places_of_words(rows: int, words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(rows, 1) and (words,) int64, whose sum is the place of each word of a matrix."""
    return torch.arange(0, rows * words, words, device=device).unsqueeze(1), torch.arange(words, device=device)


@lru_cache(maxsize=4)
def _why_not(kind: str) -> str:
    """Compile the kernel and compare it once with the operations of torch on the CPU."""
    if kind not in ("cuda", "mps"):  # "meta", and a CPU that stands for a GPU, have nothing to compile.
        return ""
    values = torch.linspace(-3, 3, 64).view(4, 2, 8)
    keys = torch.arange(4) * MIX_1
    try:
        expected = round_in_one_kernel(values, keys)
        rounded = round_in_one_kernel(values.to(kind), keys.to(kind)).cpu()
    except Exception as error:  # Whatever fails, a compiler, a driver or a later torch, torch's operations compute.
        return f"round_randomly: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return "" if torch.equal(rounded, expected) else "round_randomly: other numbers than on the CPU"


@lru_cache(maxsize=1)
def _jiterated() -> Any:
    return torch.cuda.jiterator._create_jit_fn(source_of())


def _round_cuda(values: Tensor, keys: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    words = values.view(torch.int64)
    rounded = _jiterated()(words[..., 0::2], words[..., 1::2], keys.view(-1, 1, 1), rows, columns)
    return rounded.view(torch.bfloat16)  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _shader() -> Any:
    return torch.mps.compile_shader(source_of(is_metal=True))


def _round_mps(values: Tensor, keys: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    width = values[0].numel() // 4
    _shader().round_all(out, values, keys.contiguous(), width, threads=[width, len(values)])
    return out


_KERNELS: dict[str, Callable[..., Tensor]] = {"cuda": _round_cuda, "mps": _round_mps}
_library = torch.library.Library(NAMESPACE, "DEF")
# values (count, n, m) fp32, keys (count,), rows (n, 1) and columns (m / 4,) from `places_of_words`
_library.define("round_randomly(Tensor values, Tensor keys, Tensor rows, Tensor columns) -> Tensor")
_library.impl("round_randomly", _round_by_torch, "CPU")
_library.impl("round_randomly", lambda values, *_: torch.empty_like(values, dtype=torch.bfloat16), "Meta")
