from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import demo as module
from commands.demo import demo
from settings.declared import Config
from settings.loading import load
from settings.program import FILE, ROOT


def config_in(folder: Path, **more: Any) -> Config:
    folders = {name: str(folder / name) for name in ("cache_dir", "output_dir", "log_dir")}
    return load("demo", {**folders, **more})


def test_it_ends_as_the_command_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def fails(words: list[str]) -> int:
        commands.append(words)
        return 3

    monkeypatch.setattr(module, "ended", fails)
    with pytest.raises(SystemExit) as end:
        demo(config_in(tmp_path, memory_budget="100M"))
    assert end.value.code == 3 and len(commands) == 1
    assert f"--memory_budget={100 * 2**20}" in commands[0] and "--preset=demo_prose" in commands[0]
    assert "$ python train_low_mem.py train --preset=demo_prose" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)  # Three minutes on two quiet cores.
def test_the_whole_of_it_reads_dates_of_years_never_seen(tmp_path: Path) -> None:
    folders = [f"--{name}={tmp_path / name}" for name in ("cache_dir", "output_dir", "log_dir")]
    done = subprocess.run(
        [sys.executable, str(ROOT / FILE), "demo", *folders], capture_output=True, text=True, check=True
    )
    right = re.search(r"years not in training .*?([\d.]+)%", done.stdout)
    assert right is not None and float(right[1]) >= 95.0, done.stdout
    assert "export --model=" in done.stdout and "--format=web --quantize=int8" in done.stdout
