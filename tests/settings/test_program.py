"""A command that is shown may be typed as it stands; who types another Python is told which one has the packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(os.name == "nt", reason="links ask for rights there")
def test_a_python_without_the_packages_names_the_one_that_has_them(tmp_path: Path) -> None:
    """As after `make train`: the same words, typed with the Python of the system."""
    for name in os.listdir(ROOT):
        if name not in (".venv", ".git", "logs", "model_save", "settings", "train_low_mem.py"):
            (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "train_low_mem.py", tmp_path)  # It is no link, for .venv is looked for where it lies.
    shutil.copytree(ROOT / "settings", tmp_path / "settings")
    venv.create(tmp_path / "bare", with_pip=False)
    venv.create(tmp_path / ".venv", with_pip=False)
    words = [str(tmp_path / "bare" / "bin" / "python"), "train_low_mem.py", "plan", "--model_preset=t5 base"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.rstrip().endswith(".venv/bin/python train_low_mem.py plan '--model_preset=t5 base'")
