"""The wheel: every module of the tree below one package, importing the others there. `pyproject.toml` has all else.

An editable install needs no more than `frugalt5/`, whose loader reads the tree as it is.
"""

from __future__ import annotations

import runpy
import tempfile
from importlib.util import decode_source
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PACKAGE = "frugalt5"
ROOT = Path(__file__).resolve().parent
checkout = runpy.run_path(str(ROOT / PACKAGE / "checkout.py"))
NAMES = checkout["top_names"](ROOT)
lines = [line.partition("#")[0].strip() for line in Path("requirements-board.txt").read_text("utf8").splitlines()]


class BuildPackage(build_py):
    """Copies the modules of the root folder and of `frugalt5/` into one package, and its folders below it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        folders = find_packages(exclude=[f"{PACKAGE}*", "tests*", "benchmarks*", "docs*"])
        self.package_dir = {PACKAGE: "."}
        self.packages = [PACKAGE, *(f"{PACKAGE}.{name}" for name in folders)]

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        if package != PACKAGE:
            return super().find_package_modules(package, package_dir)
        files = [path for path in (*Path().glob("*.py"), *Path(PACKAGE).glob("*.py")) if path.name != "setup.py"]
        return [(package, path.stem, str(path)) for path in files]

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        target, is_copied = super().build_module(module, module_file, package)
        path = Path(target)
        source = decode_source(path.read_bytes())
        path.write_bytes(checkout["rewritten"](source, NAMES).encode())
        return target, is_copied


with tempfile.TemporaryDirectory() as folder:  # A folder that an earlier build has left would be packed too.
    setup(
        packages=[PACKAGE],
        cmdclass={"build_py": BuildPackage},
        extras_require={"board": [line for line in lines if line and not line.startswith("-r")]},
        options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}},
    )
