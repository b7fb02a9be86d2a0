"""`doctor --check` finds what is wrong on a device, says what avoids it, and ends with a verdict."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import devices
from childproc import FAILED, ChildDied
from commands.diagnosis import device_check, device_numbers, device_speed
from commands.diagnosis.device_check import Finding, check, sized
from devices import inventory
from engine.optimizers import OPTIMIZERS
from memory.machines import this_machine
from model.dropout import Dropout
from settings.errors import UserError
from settings.loading import load
from tests.fake_device import FakeDevice


class Gpu(FakeDevice):
    """Waits twice a step, and refuses memory beyond its limit."""

    def tensor_peak_bytes(self) -> int:
        return 2**20


def test_numbers_that_are_right_pass_and_wrong_ones_are_named_with_what_avoids_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(8 * 2**30)
    assert [f.what for f in _numbers(device) if not f.is_right] == []

    dropped, update = Dropout.dropped, OPTIMIZERS["muon"].update
    is_on = iter(range(10**6))
    monkeypatch.setattr(Dropout, "dropped", lambda self, x: dropped(self, x) + (next(is_on) % 3 == 2))

    def fails(*_: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(OPTIMIZERS["muon"], "update", fails)
    wrong = {f.what: f for f in _numbers(device) if not f.is_right}
    assert "no kernel image" in wrong["four updates, muon"].found and update is not fails
    assert wrong["dropout masks"].avoid == "--dropout_rate=0" and "norm and its gradients, fp32" not in wrong


def _numbers(device: FakeDevice) -> list[Finding]:
    """The cheap comparisons."""
    words = ("norm", "dropout masks", "updates, muon", "rounding", "LoRA on")
    found = [one for one in device_numbers.comparisons(device) if any(word in one[0] for word in words)]
    return [device_numbers.measured(*one, device) for one in found]


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from model.layers import RMSNorm

    forward, calls = RMSNorm.forward, iter(range(10**6))

    def slightly_off(self: RMSNorm, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return forward(self, x, dtype) * (1 + 1e-3 * (next(calls) > 12))  # after the reference's own

    monkeypatch.setattr(RMSNorm, "forward", slightly_off)
    model = (device_numbers.SHAPE, device_numbers.RAGGED)
    assert device_numbers.gradient_error(*model, 99, 0.0, torch.float32, FakeDevice()) > device_numbers.EXACT


def test_narrow_weights_and_products_of_several_micro_batches_are_near_fp32() -> None:
    error = device_numbers.gradient_error(
        device_numbers.SHAPE, device_numbers.RAGGED, 0, 0.0, torch.bfloat16, FakeDevice()
    )
    assert device_numbers.EXACT < error < device_numbers.DEEP * device_numbers.NARROW[torch.bfloat16]


def test_the_page_has_every_part_and_a_part_that_dies_is_a_line_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = {"devices": [{
        "name": "cuda", "missing": "", "count": 1, "compute": "bfloat16", "rates": {"bfloat16": 1e13},
        "is_separate_memory": True, "free_bytes": 2**33,
    }]}  # fmt: skip
    answers = {
        "commands.diagnosis.device_speed:facts": [Finding("facts", "device", "a card")],
        "commands.doctor:look": (looked, this_machine()),
        "commands.diagnosis.device_speed:steps": (
            [Finding("waits", "host waits of a step", "2: loss.py:7", "1", False)], device_speed.Timed(0.5, 100),
        ),
        "commands.diagnosis.device_speed:peer": device_speed.Timed(1.0, 400),
    }  # fmt: skip

    def answer(function: str, *_: Any) -> Any:
        if function not in answers:
            raise ChildDied(FAILED, "AcceleratorError: CUDA error")
        return answers[function]

    row = {
        "kind": "step",
        "predicted_bytes": 2**30,
        "measured_bytes": 2**30,
        "outcome": "",
        "tensor_bytes": 2**29,
        "used_bytes": 2**31,
    }
    over = iter((1, 1, 1, 2))  # half the budget is not kept
    monkeypatch.setattr(device_check, "_call", answer)
    monkeypatch.setattr(
        device_check, "_trials", lambda _, label, __: [{**row, "label": label, "measured_bytes": next(over) * 2**30}]
    )
    with pytest.raises(UserError) as refused:
        check(load("doctor", {"check": True, "log_dir": str(tmp_path)}))
    page, report = capsys.readouterr().out, json.loads((tmp_path / "device_check.json").read_text())
    for words in ("a card", "AcceleratorError", "host waits", "2.00 times its speed in 0.25 of its memory", "3 of"):
        assert words in page, words
    assert "3 of" in report["verdict"] and len(refused.value.problems) == 3
    assert {finding["part"] for finding in report["findings"]} == {"facts", "numbers", "memory", "waits", "speed"}


def test_rows_follow_the_rate_and_the_memory_of_the_device() -> None:
    config = load("doctor", {"check": True})
    device = {"rates": {"bfloat16": 5e14}, "compute": "bfloat16", "is_separate_memory": True, "free_bytes": 2**40}
    large = sized(config, device)
    assert large.model.num_layers == 6 and large.train.effective_batch_size == 256
    small = sized(config, {**device, "free_bytes": 4 * 2**30})
    assert small.train.effective_batch_size == 16
    cpu = sized(config, {**device, "rates": {"bfloat16": 1e11}, "is_separate_memory": False})
    assert cpu.model.num_layers == 2 and cpu.data.max_seq_len == 128


def test_steps_answers_and_a_refused_step_are_measured_on_a_device_with_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from commands.diagnosis.trials import request_of
    from training.setup.resolving import Rows, resolve

    device = Gpu(8 * 2**30)
    monkeypatch.setattr(devices, "pick", lambda *_: device)
    config = load(
        "doctor",
        {"check": True, "model_preset": "tiny", "max_seq_len": 32, "max_target_len": 16, "effective_batch_size": 4},
    )
    spec = resolve(config, this_machine(), Rows.as_set(config))
    with device.watched():
        found, timed = device_speed.steps(request_of(config, spec))
    assert timed.seconds > 0 and timed.tensor_bytes == 2**20
    told = {finding.what: finding for finding in found}
    assert told["a step without memory, then one with"].is_right and "answers, 8 at a time" in told


@pytest.mark.slow
def test_all_of_it_on_a_device_with_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Facts, numbers, steps and the peer, in this process; what a trial measures takes a child and is made up."""
    device = Gpu(64 * 2**30)
    monkeypatch.setattr(devices, "pick", lambda *_: device)
    machine = this_machine()

    def answer(function: str, *arguments: Any) -> Any:
        module, _, name = function.partition(":")
        if name == "look":
            return {
                "devices": [{**inventory.measured(device), "rates": dict.fromkeys(("float32", "bfloat16"), 1e10)}]
            }, machine
        return getattr(import_module(module), name)(*arguments)

    row = {
        "kind": "step",
        "predicted_bytes": 2**30,
        "measured_bytes": 2**28,
        "outcome": "",
        "tensor_bytes": 0,
        "used_bytes": 0,
    }
    monkeypatch.setattr(device_check, "_call", answer)
    monkeypatch.setattr(device_check, "_trials", lambda _, label, __: [{**row, "label": label}])
    with device.watched():
        check(load("doctor", {"check": True, "log_dir": str(tmp_path)}))
    report = json.loads((tmp_path / "device_check.json").read_text())
    found = {finding["what"] for finding in report["findings"]}
    assert (
        len(found) > 35 and {"beside Hugging Face T5", "a step without memory, then one with", "first kernel"} <= found
    )


@pytest.mark.slow
def test_two_processes_lose_as_one() -> None:
    assert device_check._several(load("doctor", {"check": True, "device": "cpu"})).is_right
