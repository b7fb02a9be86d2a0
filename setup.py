"""The wheel: the tree as it is, below one package. `pyproject.toml` has all else."""

from __future__ import annotations

import tempfile
from pathlib import Path

from setuptools import find_packages, setup

PROGRAM = "frugalt5._program"
lines = [line.partition("#")[0].strip() for line in Path("requirements-board.txt").read_text("utf8").splitlines()]

with tempfile.TemporaryDirectory() as folder:  # what an earlier build has left would be packed too
    setup(
        package_dir={"frugalt5": "frugalt5", PROGRAM: "."},
        packages=[
            "frugalt5",
            PROGRAM,
            *(f"{PROGRAM}.{name}" for name in find_packages(exclude=["frugalt5*", "tests*", "benchmarks*", "docs*"])),
        ],
        extras_require={"board": [line for line in lines if line and not line.startswith("-r")]},
        options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}},
    )
