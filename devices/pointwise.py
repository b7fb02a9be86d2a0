"""Dropout and stochastic rounding as one GPU kernel each, compiled at first use by the compiler inside torch.

That compiler is jiterator on CUDA and ROCm (NVRTC or hiprtc, part of every build of torch) and Metal's on a Mac. The random
numbers come from a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", with the mixing
of splitmix64, Steele et al. 2014): word w of a key is the hash of key + (w + 1) GOLDEN, 64 bits that serve four elements. A
kernel reads every tensor as words of 64 bits, so that four numbers in 16 bits, or two in fp32, meet their random numbers.

Operations of torch compute the same bits on a CPU without C kernels, for sizes that do not fill words, and where compiling fails.
On meta tensors each kernel is one operation, `frugalt5::drop` and so on, which is how `benchmarks.traced` counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from devices.base import name_of, traits_of
from settings.program import IS_INSTALLED

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
MIX_1, MIX_2 = -4658895280553007687, -7723592293110705685  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# A process may import a checkout's modules by their plain names and below the package, and torch takes a namespace once.
NAMESPACE = "frugalt5_package" if IS_INSTALLED else "frugalt5"
COMPILED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The kernels, in what C++ and Metal share. WORD: unsigned, 64 bits. REAL: the type in which a Python float arrives.

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
FLOAT_BITS = """
template <typename T> float number_of(T bits) {
    union { unsigned int bits; float number; } both;
    both.bits = bits;
    return both.number;
}
template <typename T> unsigned int bits_of(T number) {
    union { unsigned int bits; float number; } both;
    both.number = number;
    return both.bits;
}
"""
METAL_FLOAT_BITS = """
template <typename T> float number_of(T bits) { return as_type<float>(bits); }
template <typename T> unsigned int bits_of(T number) { return as_type<unsigned int>(number); }
"""
# Numbers of a dtype as fp32, and back to nearest, ties to even.
CONVERSIONS = {
    torch.float32: """
template <typename T> float widen(T bits) { return number_of<T>(bits); }
template <typename T> unsigned int narrow(T number) { return bits_of<T>(number); }
""",
    torch.bfloat16: """
template <typename T> float widen(T bits) { return number_of<T>(bits << 16); }
template <typename T> unsigned int narrow(T number) {
    unsigned int bits = bits_of<T>(number);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
        return 0x7FC0u;
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}
""",
    torch.float16: """
template <typename T> float widen(T half_bits) {
    unsigned int bits = (half_bits & 0x7FFFu) << 13, sign = (half_bits & 0x8000u) << 16;
    if (bits < 0x0F800000u)
        bits = bits_of<float>(number_of<unsigned int>(bits) * 5.192296858534828e33f); /* 2^112 moves the exponent */
    else
        bits = bits | 0x7F800000u;
    return number_of<unsigned int>(bits | sign);
}
template <typename T> unsigned int narrow(T number) {
    unsigned int bits = bits_of<T>(number), sign = (bits >> 16) & 0x8000u;
    bits = bits & 0x7FFFFFFFu;
    if (bits > 0x7F800000u)
        return 0x7E00u;
    if (bits >= 0x477FF000u)
        return sign | 0x7C00u;
    if (bits < 0x38800000u) /* too small for a full mantissa: the sum rounds it */
        return sign | (bits_of<float>(number_of<unsigned int>(bits) + 0.5f) - 0x3F000000u);
    return sign | ((bits + 0xFFFu + ((bits >> 13) & 1u) - 0x38000000u) >> 13);
}
""",
}
MIX = "template <typename T> T mix(T key, T place, T more) { return (T)mixed<WORD>((WORD)key + (WORD)place + (WORD)more); }"
# BITS of a number, LANES numbers in a word of x, WORDS of x that share a random word
DROP = """
template <typename T> T drop(T x, T key, T place, T threshold, REAL scale, REAL low) {
    WORD random = random_word<T>(key, place / WORDS) >> (place % WORDS * 32), dropped = 0;
    for (int lane = 0; lane < LANES; lane++) {
        float number = widen<unsigned int>((unsigned int)((WORD)x >> (BITS * lane)) & MASK);
        number = number < (float)low ? (float)low : number;
        number = number * ((short)(random >> (16 * lane)) < threshold ? 0.0f : (float)scale);
        dropped = dropped | ((WORD)narrow<float>(number) << (BITS * lane));
    }
    return (T)dropped;
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
METAL_ENTRIES = {
    "mix": """
kernel void mix_all(device long *sums, constant long &more, uint at [[thread_position_in_grid]]) {
    sums[at] = (long)mixed<ulong>((ulong)sums[at] + (ulong)more);
}
""",
    "drop": """
kernel void drop_all(
    device long *out, device const long *x, device const long *keys, constant long &width, constant long &threshold,
    constant float &scale, constant float &low, uint2 at [[thread_position_in_grid]]) {
    const ulong place = (ulong)at.y * (ulong)width + at.x;
    out[place] = drop<long>(x[place], keys[at.y], (long)at.x, threshold, scale, low);
}
""",
    "round_randomly": """
kernel void round_all(
    device long *out, device const long *values, device const long *keys, constant long &width,
    uint2 at [[thread_position_in_grid]]) {
    const ulong place = (ulong)at.y * (ulong)width + at.x;
    out[place] = round_randomly<long>(values[2 * place], values[2 * place + 1], keys[at.y], (long)at.x, 0);
}
""",
}


def source_of(name: str, dtype: torch.dtype = torch.float32, is_metal: bool = False) -> str:
    """The text of a kernel: "mix", "drop" (of numbers of a dtype) or "round_randomly"."""
    parts = [HASH]
    if name == "drop":
        parts += [METAL_FLOAT_BITS if is_metal else FLOAT_BITS, CONVERSIONS[dtype]]
    if not (is_metal and name == "mix"):  # which is the name of a function of Metal's
        parts.append({"mix": MIX, "drop": DROP, "round_randomly": ROUND}[name])
    bits = 8 * dtype.itemsize
    words = {"WORDS": bits // 16, "BITS": bits, "LANES": 64 // bits, "MASK": hex(2**bits - 1) + "u"}
    words |= {"WORD": "ulong", "REAL": "float"} if is_metal else {"WORD": "unsigned long long", "REAL": "double"}
    text = "".join(parts)
    for word, meaning in words.items():
        text = text.replace(word, str(meaning))
    return f"#include <metal_stdlib>\nusing namespace metal;\n{text}{METAL_ENTRIES[name]}" if is_metal else text


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


def scale_kept(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    """What is kept of x, times `scale`; zeros elsewhere. One operation on a GPU."""
    return torch.ops.aten.native_dropout_backward(x, kept, scale)  # type: ignore[no-any-return]


def _drop_by_torch(x: Tensor, keys: Tensor, places: Tensor, threshold: int, scale: float, low: float) -> Tensor:
    return scale_kept(x.clamp(min=low), random_words(keys, x.shape[1]) >= threshold, scale)


def round_by_torch(values: Tensor, noise: Tensor) -> Tensor:
    """fp32, overwritten, to bf16, after int16 `noise` of the same shape was added below its last bit; NaN stays NaN."""
    no_number = values != values  # the noise would carry some of these over into 0
    bits = values.view(torch.int32)
    bits += noise.to(torch.int32).bitwise_and_(0xFFFF)
    bits &= -65536
    return values.to(torch.bfloat16).masked_fill_(no_number, torch.nan)


def _round_by_torch(values: Tensor, keys: Tensor, *places: Tensor) -> Tensor:
    return round_by_torch(values.clone(), random_words(keys, values[0].numel()).view(values.shape))


# --- as one kernel


def mix(keys: Tensor, places: Tensor, more: int = 0) -> Tensor:
    """Hash the sums keys + places + more of int64 tensors, one of which is spread over the other."""
    if is_compiled("mix", keys.device):
        return kernel("mix", keys.device)(keys, places, more)
    return mix_by_torch(keys + places if not more else (keys + places).add_(more))


def is_compiled(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a device of this kind computes "mix", "drop" or "round_randomly" in one kernel, which compiled."""
    return traits_of(device).has_compiler and not _why_not(name, dtype, device.type)


def kernel(name: str, device: torch.device) -> Callable[..., Tensor]:
    """The function that starts a kernel, with the arguments of the schemas below; elsewhere than on a GPU, the operation.

    Calling a Python function through torch's dispatcher would take 20 us.
    """
    if device.type in _KERNELS:
        return _KERNELS[device.type][name]
    return getattr(getattr(torch.ops, NAMESPACE), name).default  # type: ignore[no-any-return]


def fills_words(x: Tensor) -> bool:
    """Whether the numbers of x (N, width) can be read as words of 64 bits, line by line."""
    if x.dtype not in COMPILED_DTYPES:
        return False
    lanes = 8 // x.element_size()
    return x.is_contiguous() and x.shape[-1] % lanes == 0 and x.storage_offset() % lanes == 0


def why_not_compiled(device: torch.device) -> str:
    """What prevents these kernels on a device that should have them; empty if nothing does. Compiles one of each kind."""
    if not traits_of(device).has_compiler:
        return ""
    kernels = (("mix", torch.float32), ("drop", torch.bfloat16), ("round_randomly", torch.float32))
    return next((reason for name, dtype in kernels if (reason := _why_not(name, dtype, device.type))), "")


@lru_cache(maxsize=64)
def places_of_words(rows: int, words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(rows, 1) and (words,) int64, whose sum is the place of each word of a matrix."""
    places = torch.arange(0, rows * words, words, device=device), torch.arange(words, device=device)
    return places[0].unsqueeze(1), places[1]


@lru_cache(maxsize=32)
def _why_not(name: str, dtype: torch.dtype, kind: str) -> str:
    """Compile a kernel and compare it once with the operations of torch on the CPU."""
    if kind not in ("cuda", "mps"):  # "meta", and a CPU in the place of a GPU
        return ""
    x, keys = torch.linspace(-3, 3, 64).view(4, 16).to(dtype), torch.arange(4) * MIX_1
    given = {
        "mix": (keys, x.view(-1)[:1].long(), MIX_2),
        "drop": (x, keys, torch.arange(8), -20_000, 1.25, -1.5),
        "round_randomly": (x.view(4, 2, 8), keys, *places_of_words(2, 2, torch.device("cpu"))),
    }[name]
    try:
        on_device = [part.to(kind) if isinstance(part, Tensor) else part for part in given]
        expected, found = kernel(name, torch.device("cpu"))(*given), kernel(name, torch.device(kind))(*on_device).cpu()
    except Exception as error:  # of a compiler, a driver or a later torch: whatever it is, torch's operations compute
        return f"{name} in {name_of(dtype)}: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return "" if torch.equal(found, expected) else f"{name} in {name_of(dtype)}: other numbers than on the CPU"


_library = torch.library.Library(NAMESPACE, "DEF")
for _schema in (
    "mix(Tensor keys, Tensor places, int more) -> Tensor",
    # x (N, width), numbers below `low` raised to it; keys (N,)
    "drop(Tensor x, Tensor keys, Tensor places, int threshold, float scale, float low) -> Tensor",
    # values (count, n, m) fp32, keys (count,), rows (n, 1) and columns (m / 4,) from `places_of_words`
    "round_randomly(Tensor values, Tensor keys, Tensor rows, Tensor columns) -> Tensor",
):
    _library.define(_schema)


@lru_cache(maxsize=8)
def _jiterated(name: str, dtype: torch.dtype, **scalars: float) -> Any:
    return torch.cuda.jiterator._create_jit_fn(source_of(name, dtype), **scalars)


def _mix_cuda(keys: Tensor, places: Tensor, more: int) -> Tensor:
    return _jiterated("mix", torch.float32, more=0)(keys, places, more=more)  # type: ignore[no-any-return]


def _drop_cuda(x: Tensor, keys: Tensor, places: Tensor, threshold: int, scale: float, low: float) -> Tensor:
    words = x.view(torch.int64)
    compiled = _jiterated("drop", x.dtype, threshold=0, scale=1.0, low=0.0)
    found = compiled(words, keys.unsqueeze(1), places[: words.shape[1]], threshold=threshold, scale=scale, low=low)
    return found.view(x.dtype)  # type: ignore[no-any-return]


def _round_cuda(values: Tensor, keys: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    words, compiled = values.view(torch.int64), _jiterated("round_randomly", torch.float32)
    found = compiled(words[..., 0::2], words[..., 1::2], keys.view(-1, 1, 1), rows, columns)
    return found.view(torch.bfloat16)  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _shader(name: str, dtype: torch.dtype) -> Any:
    return torch.mps.compile_shader(source_of(name, dtype, is_metal=True))


def _mix_mps(keys: Tensor, places: Tensor, more: int) -> Tensor:
    sums = (keys + places).contiguous()
    _shader("mix", torch.float32).mix_all(sums, more, threads=[sums.numel()])
    return sums


def _drop_mps(x: Tensor, keys: Tensor, places: Tensor, threshold: int, scale: float, low: float) -> Tensor:
    out, width = torch.empty_like(x), x.shape[1] * x.element_size() // 8
    compiled = _shader("drop", x.dtype).drop_all
    compiled(out, x, keys.contiguous(), width, threshold, scale, low, threads=[width, len(x)])
    return out


def _round_mps(values: Tensor, keys: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    out, width = torch.empty_like(values, dtype=torch.bfloat16), values[0].numel() // 4
    _shader("round_randomly", torch.float32).round_all(
        out, values, keys.contiguous(), width, threads=[width, len(values)]
    )
    return out


_KERNELS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "cuda": {"mix": _mix_cuda, "drop": _drop_cuda, "round_randomly": _round_cuda},
    "mps": {"mix": _mix_mps, "drop": _drop_mps, "round_randomly": _round_mps},
}
_library.impl("mix", lambda keys, places, more: mix_by_torch(keys + places + more), "CPU")
_library.impl("drop", _drop_by_torch, "CPU")
_library.impl("round_randomly", _round_by_torch, "CPU")
_library.impl("mix", lambda keys, places, _: keys.new_empty(torch.broadcast_shapes(keys.shape, places.shape)), "Meta")
_library.impl("drop", lambda x, *_: torch.empty_like(x), "Meta")
_library.impl("round_randomly", lambda values, *_: torch.empty_like(values, dtype=torch.bfloat16), "Meta")
