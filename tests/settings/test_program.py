"""A command that is shown may be typed as it stands; who types another Python is told which one has the packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from settings import program

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(os.name == "nt", reason="programs have other endings")
@pytest.mark.parametrize(
    ("on_path", "runs_in_venv", "word"),
    [(["python3"], False, "python3"), ([], False, sys.executable), (["python"], True, ".venv/bin/python")],
)
def test_the_word_for_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: list[str], runs_in_venv: bool, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv").mkdir()
    for name in on_path:
        (tmp_path / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv") if runs_in_venv else sys.base_prefix)
    assert program.program() == f"{word} {ROOT}/train_low_mem.py", "it lies elsewhere"
    monkeypatch.setattr(program, "ROOT", tmp_path)
    (tmp_path / "train_low_mem.py").touch()
    assert program.program() == f"{word} train_low_mem.py"


def test_a_package_that_is_missing_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(program, "ROOT", tmp_path)
    (tmp_path / "data").mkdir()
    assert program.missing(ModuleNotFoundError("x", name="data.lost"), []) == "", "our own"
    sentence = program.missing(ModuleNotFoundError("x", name="torch.nn"), ["train"])
    assert sentence.startswith("torch, ") and f"{sys.executable} -m pip install -r requirements.txt" in sentence


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
