"""The generated page of settings is the one in the repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_settings_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs" / "make_settings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    committed = (ROOT / "docs" / "settings.md").read_text(encoding="utf8")
    assert committed == module.settings_page(), "run: python docs/make_settings.py"
