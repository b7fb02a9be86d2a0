"""The last line is said again once the launcher has ended, and only under one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CHILD = "from training.processes.last_word import say_after_launcher; say_after_launcher('saved in x')"
LAUNCHER = f"""
import os, subprocess, sys
os.environ.update({{environment}})
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
print("launcher's traceback", file=sys.stderr, flush=True)
"""


def launched(environment: dict[str, str]) -> str:
    code = LAUNCHER.replace("{environment}", repr(environment)).replace("{{", "{").replace("}}", "}")
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120).stderr


def test_below_what_the_launcher_says() -> None:
    assert launched({"TORCHELASTIC_RESTART_COUNT": "0"}) == "launcher's traceback\nsaved in x\n"


def test_without_a_launcher_nothing_is_said() -> None:
    assert launched({}) == "launcher's traceback\n"
