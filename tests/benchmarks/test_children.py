"""A benchmark's child: what it took, and why it failed."""

from __future__ import annotations

import sys

import pytest

from benchmarks.parts.children import options_of, run

MIB = 1024**2
HOLD = "import time; x = bytearray(b'1') * (300 << 20); time.sleep(0.5); print('done')"


@pytest.mark.skipif(sys.platform != "linux", reason="the high water mark is read from /proc")
def test_memory_is_what_the_child_held() -> None:
    child = run(["-c", HOLD])
    assert child.output == "done\n" and child.failure == ""
    assert 300 * MIB < child.peak_bytes < 360 * MIB
    assert child.peak_bytes < child.high_water_bytes < 400 * MIB, "pages of files come on top"
    assert child.seconds > 0.5
    assert child.curve and max(held for _, held in child.curve) == child.peak_bytes


def test_a_failure_has_a_reason() -> None:
    assert run(["-c", "raise ValueError('too wide')"]).failure == "ValueError: too wide"
    assert "want of memory" in run(["-c", "import os; os.kill(os.getpid(), 9)"]).failure
    assert run(["-c", "raise SystemExit(4)"]).failure == "exit code 4"


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert options_of(["tiny", "--repeats=3"], {"repeats": "2", "write": "True"}, "") == (
        ["tiny"],
        {"repeats": "3", "write": "True"},
    )
    with pytest.raises(SystemExit, match="unknown: --repeat; there are --repeats"):
        options_of(["--repeat=3"], {"repeats": "2"}, "")
    with pytest.raises(SystemExit) as ended:
        options_of(["--help"], {}, "how it is used")
    assert not ended.value.code and "how it is used" in capsys.readouterr().out
