"""Ctrl-C at any moment is one line and exit code 130: while modules are imported, where nobody can catch it, at the
end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIGNAL = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
# where it comes: the module that is imported then, and what stands in it
MOMENTS = {
    "the first imports": ("difflib", SIGNAL),
    "torch": ("torch", SIGNAL),
    "where nobody catches": ("torch", "class Lock:\n    def __del__(self):\n        raise KeyboardInterrupt\nLock()"),
    "after the end": ("torch", f"import atexit\natexit.register(exec, {SIGNAL!r}, {{}})\nraise SystemExit(0)"),
}


def interrupted(folder: Path, module: str, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    for name in ("pyarrow", "accelerate"):
        (folder / f"{name}.py").write_text("import torch")
    (folder / f"{module}.py").write_text(code)
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "evaluate", "--model=x", "--config=settings.yaml"]
    (folder / "settings.yaml").write_text("seed: 3\n")
    environment = {**os.environ, "PYTHONPATH": str(folder), "LC_ALL": "C.UTF-8", **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process on Windows")
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_at_any_moment(tmp_path: Path, moment: str) -> None:
    done = interrupted(tmp_path, *MOMENTS[moment])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")
    if moment == "the first imports":
        second = interrupted(tmp_path, *MOMENTS[moment], RANK="1")
        assert (second.returncode, second.stderr) == (130, ""), "the first process of a launch tells"


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    done = interrupted(tmp_path, "difflib", "1 / 0")
    assert done.returncode == 1 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr
