"""The text of the GPU kernels, compiled for the host, gives the bits of torch's operations."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from devices import pointwise
from devices.base import CUDA, override_traits
from devices.pointwise import COMPILED_DTYPES, places_of_words, source_of
from model.dropout import Dropout
from model.rows import Rows

COMPILER = shutil.which("g++") or shutil.which("clang++") or ""
CPU = torch.device("cpu")
THRESHOLD, SCALE, LOW = -20_000, 65536 / 52_768, -1.5
CUDA_LOOPS = {
    "mix": 'extern "C" void run(long n, long w, long *x, long more) { for (long i = 0; i < n; i++) x[i] = mix<long>(x[i], 5, more); }',
    "drop": """
extern "C" void run(long n, long w, long *out, long *x, long *keys, long threshold, double scale, double low) {
    for (long i = 0; i < n * w; i++)
        out[i] = drop<long>(x[i], keys[i / w], i % w, threshold, scale, low);
}""",
    "round_randomly": """
extern "C" void run(long n, long w, long *out, long *x, long *keys) {
    for (long i = 0; i < n * w; i++)
        out[i] = round_randomly<long>(x[2 * i], x[2 * i + 1], keys[i / w], i % w / 25 * 25, i % w % 25);
}""",
}
METAL = """
#include <cstring>
#define kernel static
#define device
#define constant const
typedef unsigned long ulong;
typedef unsigned int uint;
typedef unsigned short ushort;
struct uint2 { uint x, y; };
template <typename To, typename From> To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as Metal asks");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
"""
METAL_LOOPS = {
    "mix": 'extern "C" void run(long n, long w, long *x, long more) { for (uint i = 0; i < n; i++) mix_all(x, more + 5, i); }',
    "drop": """
extern "C" void run(long n, long w, long *out, long *x, long *keys, long threshold, double scale, double low) {
    const float narrow_scale = scale, narrow_low = low;
    for (uint y = 0; y < n; y++)
        for (uint at = 0; at < w; at++)
            drop_all(out, x, keys, w, threshold, narrow_scale, narrow_low, uint2{at, y});
}""",
    "round_randomly": """
extern "C" void run(long n, long w, long *out, long *x, long *keys) {
    for (uint y = 0; y < n; y++)
        for (uint at = 0; at < w; at++)
            round_all(out, x, keys, w, uint2{at, y});
}""",
}


def run(
    folder: Path, name: str, dtype: torch.dtype, is_metal: bool, out: Tensor, *more: Tensor | int | float
) -> Tensor:
    """What the kernel's text computes, of tensors as words of 64 bits, line by line."""
    text = source_of(name, dtype, is_metal)
    if is_metal:
        text = METAL + re.sub(r"\[\[.*?\]\]|#include.*|using namespace.*", "", text) + METAL_LOOPS[name]
    else:
        text += CUDA_LOOPS[name]
    (folder / "kernel.cpp").write_text(text)
    flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wno-comment", "-o"]
    command = [COMPILER, *flags, folder / f"{name}.so", folder / "kernel.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    types = {Tensor: lambda t: ctypes.c_void_p(t.data_ptr()), int: ctypes.c_long, float: ctypes.c_double}
    width = out.numel() * out.element_size() // 8 // len(out)
    ctypes.CDLL(str(folder / f"{name}.so")).run(*(types[type(part)](part) for part in (len(out), width, out, *more)))
    return out


def random_keys(count: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", COMPILED_DTYPES)
@pytest.mark.parametrize("is_metal", [False, True], ids=["cuda", "metal"])
def test_dropout(tmp_path: Path, dtype: torch.dtype, is_metal: bool) -> None:
    keys, x = random_keys(300), torch.randn(300, 24, generator=torch.Generator().manual_seed(0))
    x[:, ::5] *= 1e-6  # too small for the mantissa of fp16
    x[0, :6] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 65_504.0, 1e-40])
    x[1] = torch.nan
    x = x.to(dtype)
    expected = torch.ops.frugalt5.drop(x, keys, torch.arange(12), THRESHOLD, SCALE, LOW)
    found = run(tmp_path, "drop", dtype, is_metal, torch.empty_like(x), x, keys, THRESHOLD, SCALE, LOW)
    assert torch.equal(found.isnan(), expected.isnan())
    whole = torch.int16 if dtype.itemsize == 2 else torch.int32
    assert torch.equal(found.nan_to_num(7.0).view(whole), expected.nan_to_num(7.0).view(whole))
    assert 0.1 < (found == 0).float().mean() < 0.3


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("is_metal", [False, True], ids=["cuda", "metal"])
def test_rounding_and_the_hash(tmp_path: Path, is_metal: bool) -> None:
    keys, values = random_keys(3), torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    values[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, -0.0])
    values.view(torch.int32)[1, 0] = 0x7F800001  # a NaN that the noise would carry over
    expected = torch.ops.frugalt5.round_randomly(values.view(3, 4, 100), keys, *places_of_words(4, 25, CPU)).view(
        3, 400
    )
    out = torch.empty_like(values, dtype=torch.bfloat16)
    found = run(tmp_path, "round_randomly", torch.float32, is_metal, out, values, keys)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    keys, more = random_keys(999), 2**62 + 1
    hashed = run(tmp_path, "mix", torch.float32, is_metal, keys.clone(), more)
    assert torch.equal(hashed, torch.ops.frugalt5.mix(keys, torch.tensor([5]), more))


@pytest.mark.parametrize(("name", "dtype"), [("mix", torch.float32), ("round_randomly", torch.float32), *(("drop", dtype) for dtype in COMPILED_DTYPES)])  # fmt: skip
def test_jiterator_finds_the_name(name: str, dtype: torch.dtype) -> None:
    """It looks for the last template by a pattern that may also match inside of a function."""
    assert torch.cuda.jiterator._create_jit_fn(source_of(name, dtype)).kernel_name == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="it compiles here")
def test_where_nothing_compiles_torch_computes_and_the_reason_is_known() -> None:
    where = torch.device("cuda")
    assert "mix" in pointwise.why_not_compiled(where) and not pointwise.is_compiled("drop", where, torch.bfloat16)
    assert not pointwise.why_not_compiled(torch.device("cpu"))


def test_sizes_that_fill_no_words_are_dropped_alike() -> None:
    rows = Rows((3, 8), random_keys(2), filler=2)
    for width in (16, 18, 13):
        x = torch.ones(rows.num_tokens, width, dtype=torch.bfloat16)
        expected = Dropout(0.3, rows, site=4)(x)
        with override_traits("cpu", CUDA):
            assert torch.equal(Dropout(0.3, rows, site=4)(x), expected)
