"""The generated pages are the ones in the repository."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_of_settings_are_up_to_date() -> None:
    module = script("make_settings")
    for name, text in (("settings.md", module.settings_page()), ("settings.schema.json", module.schema())):
        assert (ROOT / "docs" / name).read_text(encoding="utf8") == text, "run: python docs/make_settings.py"


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {"index", "finetuning", "finetuning.zh-CN", "faq.zh-CN", "settings"} <= pages


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text("utf8")
    assert not [path.name for path in (ROOT / "docs").glob("*.md") if f" {path.name}\n" not in menu]


def test_every_requirement_stands_in_the_list_of_licences() -> None:
    module = script("make_licences")
    text = (ROOT / "docs" / "licences.md").read_text(encoding="utf8")
    licences = dict(re.findall(r"^\| (\S+) \| named \| (.+) \|$", text, re.MULTILINE))
    named = {requirement.name.lower() for file in module.files() for requirement in module.requirements_of(file)}
    assert named and set(licences) == named, "run: python docs/make_licences.py"
    assert not [name for name, licence in licences.items() if "not said" in licence]


def test_the_tables_of_published_keys_are_up_to_date() -> None:
    committed = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf8")
    assert committed == script("make_published_keys").page(committed), "run: python docs/make_published_keys.py"
