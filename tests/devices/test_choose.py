from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import devices
from devices import cuda, mps
from devices.choose import passed_over
from settings.errors import UserError


def machine(monkeypatch, cuda_missing="no GPU", gpus=0, mps_missing="no Mac"):
    monkeypatch.setattr(cuda, "why_missing", lambda: cuda_missing)
    monkeypatch.setattr(cuda, "count", lambda: gpus)
    monkeypatch.setattr(mps, "why_missing", lambda: mps_missing)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({"cuda_missing": "", "gpus": 2, "mps_missing": ""}, "cuda"),
        ({"mps_missing": ""}, "mps"),
        ({}, "cpu"),
    ],
)
def test_auto_takes_cuda_then_mps_then_cpu(monkeypatch, here, expected):
    machine(monkeypatch, **here)
    assert devices.pick().name == expected


def test_each_local_rank_has_its_gpu(monkeypatch):
    machine(monkeypatch, cuda_missing="", gpus=2)
    assert str(devices.pick("cuda", 1).torch_device) == "cuda:1"
    with pytest.raises(UserError, match="2 CUDA device"):
        devices.pick("auto", 2)


def test_a_named_device_is_used(monkeypatch):
    machine(monkeypatch, cuda_missing="", gpus=1, mps_missing="")
    assert [devices.pick(name).name for name in ("cuda", "mps", "cpu")] == ["cuda", "mps", "cpu"]


def test_a_device_that_is_not_here_is_an_error_that_says_what_is(monkeypatch):
    machine(monkeypatch, mps_missing="")
    with pytest.raises(UserError, match=r"--device = cuda, is not here \(no GPU\); here: mps, cpu; use"):
        devices.pick("cuda")
    with pytest.raises(UserError, match="--device = tpu, is not known"):
        devices.pick("tpu")


def test_a_gpu_that_others_hold_is_told(monkeypatch):
    def refuse(device):
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    machine(monkeypatch, cuda_missing="", gpus=2)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(
        UserError, match=r"CUDA device 1 cannot be used \(CUDA error: out of memory\); free it, choose another"
    ):
        devices.pick("auto", 1)


def test_a_gpu_that_is_here_and_not_used_is_told(monkeypatch, tmp_path):
    machine(monkeypatch, cuda_missing="this build of torch has no CUDA")
    assert passed_over("auto", devices.pick(), tmp_path) == []
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    (told,) = passed_over("auto", devices.pick(), tmp_path)
    assert told.endswith("is not used: this build of torch has no CUDA")
    assert passed_over("cpu", devices.pick("cpu"), tmp_path) == [], "as asked"


def test_choosing_counting_and_cleaning_do_not_import_torch():
    program = (
        "import sys, devices, devices.environment, devices.malloc, memory.observe.budget, memory.observe.monitor, memory.cleanup,"
        " memory.recovery; assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
