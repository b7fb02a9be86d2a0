"""Whether torch can compile on this machine: what its compiler needs beside torch. Nothing is imported, nothing
compiled.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from support.language import say


def why_not_for_gpu() -> str:
    """What is missing to compile for an NVIDIA GPU; empty where nothing is."""
    if importlib.util.find_spec("triton") is None:
        return say("Triton is missing (pip install triton; on Windows triton-windows)")
    if os.name == "nt":
        return ""  # triton-windows brings a compiler and Python's headers along.
    return _why_no_compiler("CC", ("gcc", "clang", "cc"))


def why_not_for_cpu() -> str:
    """What is missing to compile for the processor; empty where nothing is."""
    if os.name == "nt":
        return say("torch compiles for processors under Linux and macOS only")
    return _why_no_compiler("CXX", ("g++", "clang++"))


def _why_no_compiler(variable: str, names: tuple[str, ...]) -> str:
    compiler = os.environ.get(variable)
    if not any(map(shutil.which, (compiler,) if compiler else names)):
        return say("no C++ compiler was found (on Debian and Ubuntu: apt install g++)")
    folder = Path(sysconfig.get_paths()["include"])
    if not (folder / "Python.h").exists():
        return say(
            "Python's headers are missing in {folder} (on Debian and Ubuntu: apt install python3-dev)", folder=folder
        )
    return ""
