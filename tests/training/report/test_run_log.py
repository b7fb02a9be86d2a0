"""The log of a run: its files can be read whatever a kill left behind, and say how the run ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices import pick
from memory.monitor import Monitor
from settings.errors import UserError
from support.language import say, speak
from tests.training.small_runs import configuration
from training.report.endings import Interrupted
from training.report.heartbeat import Heartbeat
from training.report.log_files import MetricsFile, close_log, log_crash, open_log
from training.report.run_log import RunLog

STOPPED = "stopped after step {step}, saved in {folder}; continue with\n  {command}"


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


def log_text(folder: Path) -> str:
    (path,) = (folder / "logs").glob("chat_trainer_low_mem_*_mine.log")
    return path.read_text(encoding="utf8")


@pytest.fixture(autouse=True)
def no_open_log() -> Iterator[None]:
    close_log()
    yield
    close_log()


def log_in(folder: Path, start_step: int, is_main: bool = True, **more: Any) -> RunLog:
    config = configuration(folder, "mine")
    return RunLog(config.run, config.train, start_step, Monitor(2**30, pick("cpu")), is_main, Heartbeat(), **more)


def test_an_event_is_one_flushed_line_and_a_sentence_in_the_log(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    with log_in(tmp_path, 0, listeners=[heard.append]) as log:
        log.event("eval", "better", step=1, loss=np.float32(2.5), rows=np.int64(3), folder=Path("a"), rate=float("nan"))
        log.event("sample", answer="二\n行", nested={"x": [1, float("inf")]}, name="caf\udce9")
        lines = log.path.read_bytes().splitlines()
    assert lines[0] == b'{"event": "eval", "step": 1, "loss": 2.5, "rows": 3, "folder": "a", "rate": null}'
    assert "二".encode() in lines[1] and json.loads(lines[1])["nested"] == {"x": [1, None]}
    assert [json.loads(line) for line in lines] == heard and heard[1]["name"] == "caf\udce9"
    assert [line.split("| ")[2] for line in log_text(tmp_path).splitlines()] == [
        "run mine",
        "better",
        "ended: all done",
    ]


@pytest.mark.parametrize(
    ("error", "lines", "is_event"),
    [
        (Interrupted(say(STOPPED, step=3, folder="f", command="c")), ["stopped after step 3, saved in f", "c"], False),
        (UserError("--a = 1, is wrong", "--b = 2, too"), ["--a = 1, is wrong", "--b = 2, too"], True),
    ],
)
def test_the_log_says_in_english_how_a_run_ended(
    tmp_path: Path, error: BaseException, lines: list[str], is_event: bool
) -> None:
    speak("zh")
    try:
        with pytest.raises(type(error)), log_in(tmp_path, 3) as log:
            raise error
    finally:
        speak("en")
    endings = [line.partition("ended: ")[2] for line in log_text(tmp_path).splitlines() if "ended: " in line]
    assert [ending.partition(";")[0] for ending in endings] == lines
    assert events(log.path) == [{"event": "failed", "step": 3, "reason": "\n".join(lines)}] * is_event


def test_resume_keeps_each_step_once_and_drops_what_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write({"event": "start", "name": "二"})
    for step in range(1, 8):
        metrics.write({"event": "step", "step": step, "loss": 1 / step})
        metrics.write({"event": "recovery", "step": step})
    metrics.truncate_after(6, spared="recovery")
    metrics.close()
    assert events(path)[-1] == {"event": "recovery", "step": 7}, "why a run went back stays"
    whole_lines = path.read_bytes().splitlines(keepends=True)[:9]
    with path.open("ab") as file:
        file.write('not json\n[1]\n{"event": "step", "step": 4, "text": "二'.encode()[:-1])
    metrics = MetricsFile(path, keep_until=4)
    metrics.write({"event": "step", "step": 5})
    metrics.close()
    assert path.read_bytes() == b"".join([*whole_lines, b'{"event": "step", "step": 5}\n'])
    assert [other.name for other in path.parent.iterdir()] == ["metrics.jsonl"]
    MetricsFile(path).close()
    assert path.read_bytes() == b"", "a new run starts empty"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--log_dir = .*file"):
        open_log(tmp_path / "file", "run", True, print)
    metrics = MetricsFile(Path("/dev/full"))
    with pytest.raises(UserError):
        metrics.write({"event": "start"})
    metrics.close()
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.skipif(os.name == "nt", reason="an open file stays there")
def test_a_crash_is_not_written_to_a_log_that_was_removed(tmp_path: Path) -> None:
    path = open_log(tmp_path, "my_run", True, print)
    assert path is not None
    path.unlink()
    assert log_crash("Traceback: boom") is None, "nobody would find it there"
    close_log()
