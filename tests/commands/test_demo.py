from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import demo as module
from commands.demo import demo, scores
from data.sources.dates import build_sample_dates
from settings.declared import Config
from settings.loading import load
from settings.program import FILE, ROOT

SHORT = ("--max_steps=2", "--eval_steps=2", "--save_steps=2", "--num_threads=1", "--compiled_kernels=False")
SMALL = ("--d_model=16", "--d_ff=16", "--num_layers=1", "--num_decoder_layers=1")


def config_in(folder: Path, **more: Any) -> Config:
    folders = {name: str(folder / name) for name in ("cache_dir", "output_dir", "log_dir")}
    return load("demo", {**folders, **more})


@pytest.mark.slow
def test_both_trainings_the_scores_and_the_line_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prose.txt").write_text("\n\n".join(f"the river runs, {n} boats" for n in range(300)), encoding="utf8")

    def short(words: list[str]) -> int:
        is_first = "--preset=demo_prose" in words
        more = [*SHORT, *SMALL, f"--train_file={tmp_path / 'prose.txt'}"] if is_first else SHORT
        return subprocess.run([*words, *more], capture_output=True).returncode

    monkeypatch.setattr(module, "ended", short)
    monkeypatch.setattr("data.sources.dates.TRAIN_ROWS", 300)
    monkeypatch.setattr("data.sources.dates.HELD_OUT_ROWS", 8)
    demo(config_in(tmp_path, device="cpu"))
    output = capsys.readouterr().out
    first, second = sorted(path.name for path in (tmp_path / "output_dir").iterdir() if path.is_dir())[::-1]
    assert first.startswith("pretrain_") and f"--finetune_from={tmp_path / 'output_dir' / first}" in output
    assert len(re.findall(r"of 8 +\d", output)) == 3 and output.count("wrong, should be") == 5
    assert len(re.findall(r"planned [\d.]+ MiB, measured [\d.]+ MiB", output)) == 2
    assert output.rstrip().endswith(
        f'generate --model={tmp_path / "output_dir" / second} --input="the 3rd of March, 2021"'
    )


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


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_is_the_trainings_to_answer(tmp_path: Path) -> None:
    """It finishes its step and saves, however long that takes: it is told, and not killed."""
    training = (
        "import os, signal, socket, sys\nfrom training.processes.interrupts import Interrupts\n"
        "come, told = socket.socketpair()\ntold.setblocking(False)\nsignal.set_wakeup_fd(told.fileno())\n"
        "with Interrupts(repeat_seconds=60) as asked:\n    os.kill(os.getppid(), signal.SIGTERM)\n    come.recv(1)\n"
        "    print('saved', flush=True)\nsys.exit(130 if asked.stop_requested else 1)"
    )
    code = (
        "import sys\nfrom commands.demo import ended\nfrom training.processes.interrupts import ends_like_ctrl_c\n"
        "with ends_like_ctrl_c():\n    sys.exit(ended([sys.executable, '-c', sys.argv[1]]))"
    )
    root = Path(module.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code, training], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (130, "saved\n"), done.stderr


def test_an_answer_is_right_letter_by_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.sources.dates.TRAIN_ROWS", 4)
    monkeypatch.setattr("data.sources.dates.HELD_OUT_ROWS", 4)
    files = build_sample_dates(tmp_path)
    first = json.loads(files.years.read_text(encoding="utf8").splitlines()[0])
    dates = {first["prompt"]: first["response"], "the 3rd of March, 2021": "2021-03-03"}

    def answer(texts: Sequence[str]) -> list[str]:
        return [dates.get(text, "2021-0303") for text in texts]

    assert [row[1] for row in scores(answer, files)] == ["1 of 4", "0 of 4", "0 of 4"]


@pytest.mark.slow
def test_the_whole_of_it_reads_dates_of_years_never_seen(tmp_path: Path) -> None:
    folders = [f"--{name}={tmp_path / name}" for name in ("cache_dir", "output_dir", "log_dir")]
    done = subprocess.run(
        [sys.executable, str(ROOT / FILE), "demo", *folders], capture_output=True, text=True, check=True
    )
    right = re.search(r"years not in training .*?([\d.]+)%", done.stdout)
    assert right is not None and float(right[1]) >= 95.0, done.stdout
