"""The text of the GPU kernel, compiled for the host, gives the bits of torch's operations."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from devices import pointwise
from devices.pointwise import places_of_words, source_of

COMPILER = shutil.which("g++") or shutil.which("clang++") or ""
CPU = torch.device("cpu")
CUDA_LOOP = """
extern "C" void run(long n, long w, long *out, long *x, long *keys) {
    for (long i = 0; i < n * w; i++)
        out[i] = round_randomly<long>(x[2 * i], x[2 * i + 1], keys[i / w], i % w / 25 * 25, i % w % 25);
}"""
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
METAL_LOOP = """
extern "C" void run(long n, long w, long *out, long *x, long *keys) {
    for (uint y = 0; y < n; y++)
        for (uint at = 0; at < w; at++)
            round_all(out, x, keys, w, uint2{at, y});
}"""


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("is_metal", [False, True], ids=["cuda", "metal"])
def test_rounding(tmp_path: Path, is_metal: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(-(2**62), 2**62, (3,), generator=generator)
    values = torch.randn(3, 400, generator=generator)
    values[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, -0.0])
    values.view(torch.int32)[1, 0] = 0x7F800001  # a NaN that the noise would carry over
    expected = torch.ops.frugalt5.round_randomly(values.view(3, 4, 100), keys, *places_of_words(4, 25, CPU))
    text = source_of(is_metal)
    if is_metal:
        text = METAL + re.sub(r"\[\[.*?\]\]|#include.*|using namespace.*", "", text)
    (tmp_path / "kernel.cpp").write_text(text + (METAL_LOOP if is_metal else CUDA_LOOP))
    flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wno-comment", "-o"]
    command = [COMPILER, *flags, tmp_path / "kernel.so", tmp_path / "kernel.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    tensors = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (rounded, values, keys))
    ctypes.CDLL(str(tmp_path / "kernel.so")).run(ctypes.c_long(3), ctypes.c_long(100), *tensors)
    assert torch.equal(rounded.view(torch.int16), expected.view(3, 400).view(torch.int16))


def test_jiterator_finds_the_name() -> None:
    """It looks for the last template by a pattern that may also match inside of a function."""
    assert torch.cuda.jiterator._create_jit_fn(source_of()).kernel_name == "round_randomly"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it compiles here")
def test_where_nothing_compiles_torch_computes_and_the_reason_is_known() -> None:
    cuda = torch.device("cuda")
    assert "round_randomly" in pointwise.why_no_rounding_kernel(cuda) and not pointwise.is_compiled(cuda)
    assert not pointwise.why_no_rounding_kernel(torch.device("cpu"))
