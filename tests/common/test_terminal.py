"""Text in the columns of a terminal; what is to be copied stays whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
