"""What is written can be read again, each step once, whatever a kill left behind."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loguru import logger

from settings.errors import UserError
from training.report import tracking
from training.report.tracking import MetricsFile, close_log, log_crash, open_log


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


@pytest.fixture(autouse=True)
def no_open_log() -> Iterator[None]:
    yield
    close_log()


def test_one_flushed_line_an_event(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    metrics.write(
        "step", step=1, loss=np.float32(2.5), rows=np.int64(3), folder=Path("a"), nested={"x": [1, float("inf")]}
    )
    text = metrics.path.read_text(encoding="utf8")  # before it is closed
    assert text.startswith('{"event": "step"') and text.endswith("\n") and text.count("\n") == 1
    expected = {"event": "step", "step": 1, "loss": 2.5, "rows": 3, "folder": "a", "nested": {"x": [1, None]}}
    assert json.loads(text) == expected
    metrics.write("sample", answer="二\n行")
    metrics.close()
    assert "二" in metrics.path.read_text(encoding="utf8") and len(events(metrics.path)) == 2


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write("step", loss=float("nan"), rate=np.float64("-inf"))
    metrics.close()
    assert events(metrics.path) == [{"event": "step", "loss": None, "rate": None}]


def test_resume_keeps_each_step_once_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write("start", name="a")
    for step in range(1, 8):
        metrics.write("step", step=step, loss=1 / step)
        metrics.write("memory", step=step)
    metrics.close()
    with path.open("ab") as file:
        file.write('{"event": "step", "step": 4, "text": "二'.encode()[:-1])

    metrics = MetricsFile(path, resume=True)
    assert metrics.truncate_after(4) == 7
    for step in range(5, 10):
        metrics.write("step", step=step)
    metrics.close()
    assert [e["step"] for e in events(path) if e["event"] == "step"] == list(range(1, 10))
    assert events(path)[0] == {"event": "start", "name": "a"}
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_goes_back_still_says_why(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for event in ("step", "recovery"):
        metrics.write(event, step=7)
    assert metrics.truncate_after(4, spared="recovery") == 1 and metrics.truncate_after(4) == 1
    metrics.close()


def test_a_line_without_its_newline_was_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}\nnot json\n[1]\n{"event": "step", "step": 2}')
    metrics = MetricsFile(path, resume=True)
    assert metrics.truncate_after(9) == 3
    metrics.close()
    assert events(path) == [{"event": "step", "step": 1}]


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    for _ in range(2):
        metrics = MetricsFile(tmp_path / "metrics.jsonl")
        metrics.write("start")
        metrics.close()
    assert len(events(tmp_path / "metrics.jsonl")) == 1


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "run" / "metrics.jsonl", is_main=False)
    metrics.write("step", step=1)
    assert metrics.truncate_after(0) == 0
    metrics.close()
    assert open_log(tmp_path / "logs", "run", is_main=False) is None
    logger.error("unheard")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--log_dir = .*file.*cannot be written"):
        open_log(tmp_path / "file", "run")
    with pytest.raises(UserError, match=r"--log_dir = .*cannot be written"):
        MetricsFile(tmp_path / "file" / "run" / "metrics.jsonl")


def test_the_log_takes_everything_and_the_screen_warnings(tmp_path: Path) -> None:
    shown: list[str] = []
    path = open_log(tmp_path / "logs", "my_run", console=shown.append)
    assert path is not None and re.fullmatch(r"chat_trainer_low_mem_\d{8}_\d{6}_my_run\.log", path.name)
    logger.debug("quiet detail {}", 1)
    logger.info("内存监控 phase train")
    logger.warning("less memory than asked")
    text = path.read_text(encoding="utf8")
    for part in ("my_run", "quiet detail 1", "less memory than asked"):
        assert part in text
    assert len([line for line in text.splitlines() if "内存监控" in line]) == 1
    assert shown == ["WARNING: less memory than asked"]


def test_starts_of_one_second_have_logs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = time.struct_time((2026, 1, 2, 3, 4, 59, 4, 2, 0))
    later = time.localtime
    monkeypatch.setattr(tracking.time, "localtime", lambda *given: later(*given) if given else moment)
    names = [str(open_log(tmp_path, name)) for name in ("one", "two", "one", "one")]
    monkeypatch.undo()
    begin = f"{tmp_path}/chat_trainer_low_mem_20260102_03"
    assert names == [f"{begin}{end}.log" for end in ("0459_one", "0459_two", "0500_one", "0501_one")]


def test_a_log_that_is_emptied_goes_on_at_its_beginning(tmp_path: Path) -> None:
    """As logrotate's copytruncate does: no hole of zeros is left where the lines were."""
    path = open_log(tmp_path, "run")
    assert path is not None
    logger.info("first")
    os.truncate(path, 0)
    logger.info("second")
    text = path.read_bytes()
    assert b"second" in text and b"first" not in text and b"\0" not in text


def test_a_crash_goes_into_the_open_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert log_crash("no log is open") is None
    path = open_log(tmp_path, "run")
    assert path is not None
    assert log_crash("Traceback: boom") == path
    assert "Traceback: boom" in path.read_text(encoding="utf8")
    assert capsys.readouterr() == ("", "")
    assert tracking._open_log is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_full_disk_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full = Path("/dev/full")
    monkeypatch.setattr(tracking, "_new_file", lambda *_: full.open("a", encoding="utf8"))
    with pytest.raises(UserError, match=r"--log_dir = .*, cannot be written: No space left on device; free space"):
        open_log("/dev", "a run")
    close_log()
    metrics = MetricsFile(full)
    with pytest.raises(UserError, match="No space left on device"):
        metrics.write("start")
    metrics.close()
    assert "Traceback" not in "".join(capfd.readouterr())
