"""Measured speeds are kept for estimates; a file that is missing, broken or false changes no choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from devices import machine_file
from devices.cpu import CpuDevice
from devices.machine_file import Measured, keep, place, read
from devices.measuring import known_speed, measure


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frugalt5" / "machine.json"


def test_what_was_measured_is_kept_with_date_processor_and_way(home: Path) -> None:
    assert place() == home and read("cpu: a") is None
    keep("cpu: a", "a", 2, {"float32": 1e11})
    keep("cpu: b", "b", 1, {"float32": 2e11})
    entry = json.loads(home.read_text())["cpu: a"]
    assert entry["processor"] == "a" and len(entry["date"]) == 10 and "square products" in entry["way"]
    found = read("cpu: a")
    assert found is not None and found.rates_with(4) == (("float32", 2e11),), "in proportion to the threads"
    keep("cpu: a", "a", 2, {"float32": 3e11})
    assert read("cpu: a") == Measured("a", 2, {"float32": 3e11}, entry["date"])
    assert read("cpu: b") is not None
    assert [path.name for path in home.parent.iterdir()] == ["machine.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{", '{"cpu: a": 3}', '{"cpu: a": {}}',
        '{"cpu: a": {"processor": "a", "threads": 0, "rates": {"float32": 1}, "date": "", "way": ""}}',
        '{"cpu: a": {"processor": "a", "threads": 1, "rates": {"float32": -1}, "date": "", "way": ""}}',
        '{"cpu: a": {"processor": "a", "threads": 1, "rates": {"float32": NaN}, "date": "", "way": ""}}',
        '{"cpu: a": {"processor": "a", "threads": 1, "rates": {}, "date": "", "way": ""}}',
        '{"cpu: a": {"processor": "a", "threads": 1, "rates": [1], "date": "", "way": ""}}',
    ],
)  # fmt: skip
def test_a_broken_file_is_no_file_and_is_mended(home: Path, text: str) -> None:
    home.parent.mkdir(parents=True)
    home.write_text(text)
    assert read("cpu: a") is None
    keep("cpu: a", "a", 1, {"float32": 1e9})
    assert read("cpu: a") is not None


def test_where_nothing_can_be_written_the_figures_still_serve(home: Path) -> None:
    home.parent.parent.mkdir(parents=True)
    home.parent.write_text("no folder")
    assert keep("cpu: a", "a", 1, {"float32": 1e9}).rates == {"float32": 1e9}
    assert read("cpu: a") is None


def test_a_device_is_measured_once_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.float32: 1e11, torch.bfloat16: 3e9}
    monkeypatch.setattr(CpuDevice, "multiply_rate", lambda self, dtype: rates[dtype])
    assert known_speed(CpuDevice()) is None
    measured = measure(CpuDevice())
    assert measured.rates == {"float32": 1e11, "bfloat16": 3e9}
    assert known_speed(CpuDevice()) == measured
    monkeypatch.setattr(CpuDevice, "computes_on", "another")
    assert known_speed(CpuDevice()) is None, "a home may be shared between machines"


def test_the_user_s_own_cache_folder_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))
    assert machine_file.place() == Path("/home/someone/.cache/frugalt5/machine.json")


def test_a_user_without_a_home_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert read("cpu: a") is None
    assert keep("cpu: a", "a", 1, {"float32": 1e9}).rates == {"float32": 1e9}, "the next run measures again"
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        machine_file.place()


def test_a_disk_has_rates_of_its_own_by_where_it_is_mounted(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "not yet there"
    assert machine_file.disk_rates(folder) is None
    machine_file.keep_disk(folder, 2e9, 1e9)
    assert machine_file.disk_rates(tmp_path) == (2e9, 1e9) == machine_file.disk_rates(folder)
    keep(machine_file.disk_key(tmp_path), "x", 1, {"read": 1.0})
    assert machine_file.disk_rates(folder) is None, "half of it is nothing"
