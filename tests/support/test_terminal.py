"""Text in the columns of a terminal; what is to be copied stays whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.terminal import shortened, width

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(os.name == "nt", reason="no terminals")
def test_refusals_fit_the_terminal_and_are_one_line_elsewhere() -> None:
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "train", "--model_preset=tnyi"]
    terminal, inside = os.openpty()
    with subprocess.Popen(command, stderr=inside, env={**os.environ, "COLUMNS": "70"}) as child:
        os.close(inside)
        output = b""
        while True:
            try:
                output += os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
    os.close(terminal)
    lines = output.decode().splitlines()
    assert child.returncode == 2 and len(lines) > 3 and all(len(line) <= 70 for line in lines), lines
    assert lines[-1].endswith("did you mean tiny?")
    piped = subprocess.run(command, capture_output=True, text=True).stderr
    assert len(piped.splitlines()) == 2 and " ".join(piped.split()) == " ".join(output.decode().split())


@pytest.mark.parametrize("letter", ["a", "中", "e\u0301"])
def test_the_middle_of_a_name_is_left_out(letter: str) -> None:
    """Also of a whole document, which a preview shows: the time does not grow by the square of its length."""
    name = shortened(f"begin{letter * 10**5}end", 21)
    assert name.startswith(f"begin{letter}") and name.endswith(f"{letter}end") and "…" in name
    assert 20 <= width(name) <= 21 and shortened("begin", 5) == "begin"
