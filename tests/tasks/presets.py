"""The presets of runs, by the head that they train."""

from __future__ import annotations

from typing import Any

from settings.precedence import PRESETS_DIR, read_settings_file, run_presets


def preset_settings(name: str) -> dict[str, Any]:
    """What a preset says."""
    return read_settings_file(PRESETS_DIR / f"{name}.yaml")


def presets_of(head: str) -> list[str]:
    """The names of the presets with a head."""
    return [name for name in run_presets() if preset_settings(name).get("head") == head]
