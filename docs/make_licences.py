"""Writes docs/licences.md, the licences of all dependencies: `python docs/make_licences.py`.

Every package that is needed, directly or by another one, with its licence as its own metadata says it: the field
`License-Expression`, else the classifiers, else the field `License`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licences.md"
TITLES = {
    "requirements.txt": "What training needs",
    "requirements-dev.txt": "What tests, lint and benchmarks need on top",
}
INTRODUCTION = """# Licences of the packages used

Written by `docs/make_licences.py` from the metadata of the installed packages, never by hand. None of them is part of this
repository: `pip` installs them. *Named* packages are in a requirements file; the others are their dependencies on Linux with a
CPU. For GPUs, torch adds NVIDIA's libraries (`nvidia-*`), under NVIDIA's own terms.

"""
_LICENCE_CLASS = "License :: "


def files() -> list[Path]:
    """The requirements files; that of training first."""
    return sorted(ROOT.glob("requirements*.txt"), key=lambda path: len(path.name))


def requirements_of(file: Path) -> list[Requirement]:
    """The packages that a requirements file names."""
    lines = (line.split("#")[0].strip() for line in file.read_text(encoding="utf8").splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-r ")]


def needed(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
    """Name -> package, of these and of all that they need on this machine."""
    found: dict[str, Distribution] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # an option of a package that is not used
        for text in package.requires or []:
            further = Requirement(text)
            extras = requirement.extras or {""}
            wanted = further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras)
            if wanted and canonicalize_name(further.name) not in found:
                waiting.append(further)
        found.setdefault(name, package)
    return found


def licence_of(package: Distribution) -> str:
    """What a package's metadata says of its licence, in a few words."""
    about: Any = package.metadata  # a message, whose fields may stand several times or not at all
    classes = [text.split(" :: ")[-1] for text in about.get_all("Classifier") or [] if text.startswith(_LICENCE_CLASS)]
    written = str(about.get("License") or "").strip()
    short = written.splitlines()[0][:80] if written else ""
    said = about.get("License-Expression") or "; ".join(name for name in classes if name != "OSI Approved") or short
    return re.sub(r"\s+", " ", str(said)).replace("|", "/") or "not said in its metadata"


def page() -> str:
    """The whole page."""
    text, earlier = INTRODUCTION, set[str]()
    names = {canonicalize_name(requirement.name) for file in files() for requirement in requirements_of(file)}
    for file in files():
        named = requirements_of(file)
        title = TITLES.get(file.name, f"What {file.name} names on top")
        packages = {name: package for name, package in needed(named).items() if name not in earlier}
        earlier |= set(packages)
        text += f"## {title}\n\n| package | | licence |\n|---|---|---|\n"
        for name, package in sorted(packages.items()):
            text += f"| {name} | {'named' if name in names else ''} | {licence_of(package)} |\n"
        text += "\n"
    return text.rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
