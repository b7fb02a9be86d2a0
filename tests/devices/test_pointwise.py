"""The text of the GPU kernel, compiled for the host, gives the bits of torch's operations."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from devices.pointwise import places_of_words, source_of

COMPILER = shutil.which("g++") or shutil.which("clang++") or ""
CPU = torch.device("cpu")
CUDA_LOOP = """
extern "C" void run(long n, long w, long *out, long *x, long *keys) {
    for (long i = 0; i < n * w; i++)
        out[i] = round_randomly<long>(x[2 * i], x[2 * i + 1], keys[i / w], i % w / 25 * 25, i % w % 25);
}"""


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_rounding(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(-(2**62), 2**62, (3,), generator=generator)
    values = torch.randn(3, 400, generator=generator)
    values[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, -0.0])
    values.view(torch.int32)[1, 0] = 0x7F800001  # a NaN that the noise would carry over
    expected = torch.ops.frugalt5.round_randomly(values.view(3, 4, 100), keys, *places_of_words(4, 25, CPU))
    (tmp_path / "kernel.cpp").write_text(source_of() + CUDA_LOOP)
    flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wno-comment", "-o"]
    command = [COMPILER, *flags, tmp_path / "kernel.so", tmp_path / "kernel.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    tensors = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (rounded, values, keys))
    ctypes.CDLL(str(tmp_path / "kernel.so")).run(ctypes.c_long(3), ctypes.c_long(100), *tensors)
    assert torch.equal(rounded.view(torch.int16), expected.view(3, 400).view(torch.int16))
