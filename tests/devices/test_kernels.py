"""Do compiled kernels do what torch's operations do, and are they made only where that is safe?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import devices
from devices import processor
from devices.kernels import build, calls
from devices.kernels.build import NoKernels
from model.dropout import Dropout
from model.layers import RMSNorm
from model.loss import LossSettings, loss_and_gradients
from model.rows import Rows

needs_kernels = pytest.mark.skipif(bool(build.why_impossible()), reason="no compiled kernels here")


@needs_kernels
def test_they_are_made_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    path = build.library(environ)
    assert path.parent == tmp_path / "frugalt5" and path.suffix == ".so"
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name, "kernels.lock"]
    made = path.stat().st_mtime_ns
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.library(environ) == path and path.stat().st_mtime_ns == made


@needs_kernels
def test_a_file_that_others_can_write_is_not_loaded_but_made_again(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    path = build.library(environ)
    whole = path.read_bytes()
    path.write_bytes(b"somebody else's")
    path.chmod(0o777)
    assert build.library(environ) == path and path.read_bytes()[:4] == whole[:4] and not path.stat().st_mode & 0o022


@needs_kernels
def test_a_lowered_processor_gets_kernels_of_its_own(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    lowered = build.library({**environ, "ATEN_CPU_CAPABILITY": "avx2"})
    is_lower = processor.here({}) != processor.AVX2
    assert (build.library(environ) != lowered) == is_lower
    with pytest.raises(NoKernels, match="AVX2"):
        build.library({**environ, "ATEN_CPU_CAPABILITY": "default"})


def test_without_a_compiler_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoKernels, match="apt install gcc"):
        build.compiler_of({})
    assert build.why_impossible({})


def test_without_the_runtime_of_torch_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoKernels, match="no GNU OpenMP runtime"):
        build.openmp_runtime()


@pytest.mark.skipif(sys.platform != "linux", reason="compiles under Linux alone")
def test_a_place_where_they_cannot_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NoKernels, match=r"cannot be kept: .*(Not a directory|File exists)"):
        build._compile("cc", (), Path("libgomp.so"), tmp_path / "file" / "kernels.so")


def test_a_kernel_without_memory_for_its_scratch_is_out_of_memory() -> None:
    calls._check(0)
    with pytest.raises(MemoryError, match="scratch"):
        calls._check(1)
    assert devices.pick("cpu").is_out_of_memory(MemoryError("a kernel found no memory for its scratch"))


def test_a_compiler_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoKernels, match=r"cc does not run: .*(No such file|cannot find)"):
        build._run([str(tmp_path / "cc")])
    with pytest.raises(NoKernels, match=r"cc cannot be run \("):
        build._digest(str(tmp_path / "cc"), (), "")


def test_a_library_that_cannot_be_loaded_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.so").write_text("no library")
    monkeypatch.setattr(calls, "library_here", lambda: (tmp_path / "kernels.so", None))
    found, reason = calls._loaded.__wrapped__()
    assert found is None and reason and "kernels.so" in reason


@pytest.mark.skipif(sys.platform != "linux", reason="compiles under Linux alone")
def test_a_compiler_that_fails_is_told_and_torch_computes(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    broken.chmod(0o755)
    words = "from devices.kernels import calls; assert calls.kernels() is None; print(calls.why_none())"
    environ = {**os.environ, "CC": str(broken), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", words], env=environ, capture_output=True, text=True, check=True)
    assert "no such option" in done.stdout or "AVX2" in done.stdout


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_adafactor(dtype: torch.dtype) -> None:
    kernels = calls.kernels()
    assert kernels is not None
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(37, 70, generator=generator).to(dtype)
    rows, columns = kernels.adafactor_sums(grad)
    square = grad.double().square()
    assert torch.allclose(rows.double(), square.mean(1)) and torch.allclose(columns.double(), square.sum(0))
    norm = kernels.adafactor_norm(grad, rows, columns)
    assert norm == pytest.approx(float((square * columns.double() * rows.double()[:, None].square()).sum()), rel=1e-5)
    weight = torch.randn(37, 70, generator=generator)
    expected = 0.9 * weight - 0.1 * grad.float() * rows[:, None] * columns
    kernels.adafactor_apply(weight, grad, rows, columns, 0.9, 0.1, 0, 0)
    assert torch.allclose(weight, expected, atol=1e-6)
    assert kernels.square_sum(grad) == pytest.approx(float(square.sum()), rel=1e-6)


def test_dropout_drops_the_same_numbers(compiled: bool) -> None:
    rows = Rows((3, 8), torch.tensor([5, -7]), filler=2)
    dropout = Dropout(0.3, rows, site=4)
    x = torch.ones(rows.num_tokens, 130)
    expected = dropout.kept(130) * dropout.scale
    assert torch.equal(dropout.drop_(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_and_its_gradients(dtype: torch.dtype, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(40, 48, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    norm = RMSNorm(48, 1e-6)
    torch.nn.init.normal_(norm.weight, generator=generator)
    norm(x).backward(grad.detach())
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    (weight * wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).backward(grad.detach().double())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, theirs in ((x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_with_all_its_terms(dtype: torch.dtype, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, head = (torch.randn(n, 16, generator=generator).to(dtype) for n in (50, 90))
    labels = torch.randint(0, 90, (50,), generator=generator)
    labels[::7] = -100
    weights = torch.randn(50, generator=generator)
    settings, grad_head = LossSettings(1, 0.1, 0.01), torch.zeros_like(head)
    total, grad_hidden = loss_and_gradients(hidden, head, labels, 0.5, settings, grad_head, weights)
    wide, table = hidden.double().requires_grad_(), head.double().requires_grad_()
    logits = wide @ table.t()
    log_z = logits.logsumexp(1)
    spread = 0.9 * logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) + 0.1 * logits.mean(1)
    expected = ((log_z - spread + 0.01 * log_z.square()) * weights * (labels >= 0)).sum()
    (0.5 * expected).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert float(total) == pytest.approx(expected.item(), rel=tolerance)
    for ours, theirs in ((grad_hidden, wide.grad), (grad_head, table.grad)):
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("width", "n"), [(16, 5), (64, 33), (512, 64), (2048, 16)])
def test_products_of_few_rows_are_those_of_torch_and_of_each_row_alone(dtype: torch.dtype, width: int, n: int) -> None:
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(n, width, generator=draw)
    weight = (wide * 50).clamp(-127, 127).to(dtype) if dtype == torch.int8 else wide.to(dtype)
    x, compiled = torch.randn(11, width, generator=draw), calls.kernels()
    assert compiled is not None and calls.takes_few(x, weight)
    whole = compiled.few_rows(x, weight)
    torch.testing.assert_close(whole, (x.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-3)
    for rows in ([0], [10], [3, 4], [8, 2, 5], list(range(4, 11)), list(range(10, -1, -1))):
        assert torch.equal(compiled.few_rows(x[rows].contiguous(), weight), whole[rows]), "the same bits"


def test_other_products_are_left_to_torch() -> None:
    x, weight = torch.zeros(2, 32), torch.zeros(4, 32)
    assert calls.takes_few(x, weight)
    assert not calls.takes_few(x[:, :24].contiguous(), weight[:, :24].contiguous()), "no whole vectors"
    assert not calls.takes_few(x.bfloat16(), weight.bfloat16()) and not calls.takes_few(x.t(), weight)


@needs_kernels
def test_a_label_beyond_the_vocabulary_is_refused() -> None:
    """The kernel would write where it says."""
    kernels = calls.kernels()
    assert kernels is not None
    with pytest.raises(IndexError, match="label 7 is out of bounds for 7 words"):
        kernels.chunk_loss(torch.zeros(2, 7), torch.tensor([6, 7]), None, 0.0, 0.0, 1.0)
    assert kernels.chunk_loss(torch.zeros(2, 7), torch.tensor([6, -100]), None, 0.0, 0.0, None)[1] == 0.0
