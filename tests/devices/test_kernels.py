"""Compiled kernels compute what torch's operations do, and are made only where that is safe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from devices import processor
from devices.kernels import build, calls
from devices.kernels.build import NoKernels
from devices.pointwise import MIX_1, mix_by_torch, random_words
from model.dropout import Dropout
from model.layers import RMSNorm
from model.loss import LossSettings, loss_and_gradients
from model.rows import Rows

needs_kernels = pytest.mark.skipif(bool(build.why_impossible()), reason="no compiled kernels here")
BF16 = torch.bfloat16
FP32 = torch.float32


@needs_kernels
def test_they_are_made_once_for_each_processor_and_never_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))  # sooner done
    path = build.library(environ)
    assert sorted(entry.name for entry in (tmp_path / "frugalt5").iterdir()) == [path.name, "kernels.lock"]
    whole = path.read_bytes()
    path.write_bytes(b"somebody else's")
    path.chmod(0o777)
    assert build.library(environ) == path and path.read_bytes()[:4] == whole[:4] and not path.stat().st_mode & 0o022
    lowered = build.library({**environ, "ATEN_CPU_CAPABILITY": "avx2"})
    assert (path != lowered) == (processor.here({}) != processor.AVX2)
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.library(environ) == path


@pytest.mark.skipif(sys.platform != "linux", reason="compiles under Linux alone")
@pytest.mark.parametrize("fault", ["compiler fails", "no place"])
def test_where_they_cannot_be_made_torch_computes(tmp_path: Path, fault: str) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    if fault == "no place":
        (tmp_path / "frugalt5").write_text("in the way")
    else:
        environ["CC"] = str(tmp_path / "cc")
        (tmp_path / "cc").write_text("#!/bin/sh\n[ $1 = --version ] || exit 1\n")
        (tmp_path / "cc").chmod(0o755)
    with pytest.raises(NoKernels):
        build.library(environ)
    if fault != "compiler fails":
        return
    words = "from devices.kernels import calls; assert calls.kernels() is None; print(calls.why_none())"
    done = subprocess.run([sys.executable, "-c", words], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, done.stderr


@needs_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16])
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
    kernels.adafactor_apply(weight, grad, rows, columns, 0.9, 0.1, 0)
    assert torch.allclose(weight, expected, atol=1e-6)
    assert kernels.square_sum(grad) == pytest.approx(float(square.sum()), rel=1e-6)


@pytest.mark.parametrize("compiled", [True], indirect=True)
def test_dropout_drops_what_its_definition_drops(compiled: bool) -> None:
    rows = Rows((3, 8), torch.tensor([5, -7]), filler=2)
    dropout = Dropout(0.3, rows, site=4)
    of_rows = dropout.row_keys()[rows.row_of_token(torch.device("cpu"))]
    of_tokens = mix_by_torch(of_rows + rows.positions(torch.device("cpu")) * MIX_1)
    expected = (random_words(of_tokens, 130) >= dropout.threshold) * dropout.scale
    assert torch.equal(dropout(torch.ones(rows.num_tokens, 130)), expected)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_norm_and_its_gradients(dtype: torch.dtype, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(40, 48, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    norm = RMSNorm(48, 1e-6)
    torch.nn.init.normal_(norm.weight, generator=generator)
    norm(x).backward(grad.detach())
    wide = x.detach().double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    (weight * wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).backward(grad.detach().double())
    tolerance = 1e-5 if dtype == FP32 else 3e-2
    for ours, expected_gradient in ((x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        assert (ours.double() - expected_gradient).abs().max() <= tolerance * expected_gradient.abs().max()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_smoothed_and_weighted_loss(dtype: torch.dtype, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, head = (torch.randn(n, 16, generator=generator).to(dtype) for n in (50, 90))
    labels = torch.randint(0, 90, (50,), generator=generator)
    labels[::7] = -100
    weights = torch.randn(50, generator=generator)
    settings = LossSettings(1, 0.1)
    grad_head = torch.zeros_like(head)
    total, grad_hidden = loss_and_gradients(hidden, head, labels, 0.5, settings, grad_head, weights)
    wide = hidden.double().requires_grad_()
    table = head.double().requires_grad_()
    logits = wide @ table.t()
    log_z = logits.logsumexp(1)
    spread = 0.9 * logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) + 0.1 * logits.mean(1)
    expected = ((log_z - spread) * weights * (labels >= 0)).sum()
    (0.5 * expected).backward()
    tolerance = 1e-5 if dtype == FP32 else 3e-2
    assert float(total) == pytest.approx(expected.item(), rel=tolerance)
    for ours, expected_gradient in ((grad_hidden, wide.grad), (grad_head, table.grad)):
        assert (ours.double() - expected_gradient).abs().max() <= tolerance * expected_gradient.abs().max()


@needs_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.int8])
def test_products_of_few_rows_are_those_of_torch_and_of_each_row_alone(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    wide, x = (torch.randn(n, 512, generator=draw) for n in (33, 11))
    weight = (wide * 50).clamp(-127, 127).to(dtype) if dtype == torch.int8 else wide.to(dtype)
    kernels = calls.kernels()
    assert kernels is not None and calls.takes_few(x, weight)
    assert not calls.takes_few(x[:, :24].contiguous(), weight[:, :24].contiguous()), "no whole vectors"
    whole = kernels.few_rows(x, weight)
    torch.testing.assert_close(whole, (x.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-3)
    for rows in ([10], [8, 2, 5], list(range(10, -1, -1))):
        assert torch.equal(kernels.few_rows(x[rows].contiguous(), weight), whole[rows]), "the same bits"


@needs_kernels
def test_a_label_beyond_the_vocabulary_is_refused() -> None:
    """The kernel would write where it says."""
    kernels = calls.kernels()
    assert kernels is not None
    with pytest.raises(IndexError):
        kernels.chunk_loss(torch.zeros(2, 7), torch.tensor([6, 7]), None, 0.0, 1.0)
    assert kernels.chunk_loss(torch.zeros(2, 7), torch.tensor([6, -100]), None, 0.0, None)[1] == 0.0
