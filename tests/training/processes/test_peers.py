"""One process fails: all end within seconds, with the right exit codes and one line that says who and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from training.processes.peers import Peers

CHILD = Path(__file__).with_name("peers_child.py")


def run_two(deed: str) -> list[tuple[int, str]]:
    return run_ranks(CHILD, 2, deed, kill_last=deed == "hang")


@pytest.mark.parametrize(
    ("deed", "code", "words"),
    [
        pytest.param("refuse", 2, "failed: --train_file = x, is torn", id="wrong data on one machine"),
        pytest.param("crash", 1, "failed: ValueError: a bug", id="an exception"),
        pytest.param("ctrl-c", 130, " was interrupted", id="a signal to one", marks=pytest.mark.slow),
        pytest.param("overflow", 3, "failed: does not fit here", id="out of memory", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_one_ends_all_with_its_exit_code(deed: str, code: int, words: str) -> None:
    (first, told), (second, own) = run_two(deed)
    assert (first, second) == (code, code), told + own
    lines = [line for line in told.splitlines() if line.startswith("stopped: ")]
    assert len(lines) == 1 and "process 1 of 2" in lines[0] and words in lines[0], told
    assert "stopped" not in own


@pytest.mark.parametrize("deed", ["kill", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_killed_process_is_named(deed: str) -> None:
    """Killed: the connection breaks. Stopped, as on a machine without power: only the missing beats tell."""
    (first, told), _ = run_two(deed)
    assert first == 1
    assert told.count("stopped: process 1 of 2 is gone without a word") == 1, told
    assert "continue with\n  train --is_keep_training=True --run_name=ours" in told, told


def test_what_all_refuse_is_told_once() -> None:
    results = run_two("all refuse")
    assert [code for code, _ in results] == [2, 2]
    text = "".join(told for _, told in results)
    assert text.count("is wrong everywhere") == 1, text


@pytest.mark.parametrize(("deed", "code"), [("numbers", 0), pytest.param("interrupt", 130, marks=pytest.mark.slow)])
def test_an_agreed_end_is_quiet(deed: str, code: int) -> None:
    for returned, told in run_two(deed):
        assert returned == code and "stopped" not in told, told


def test_one_process_needs_nobody() -> None:
    with pytest.raises(ValueError, match="own"), Peers(0, 1):
        raise ValueError("own")
