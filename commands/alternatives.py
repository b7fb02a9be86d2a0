"""Another choice in place of one that the settings hold: an alternative that is tried, or what a model's folder fixes."""

from __future__ import annotations

from typing import Any

from settings.declared import Config


def with_change(config: Config, **values: Any) -> Config:
    """The same settings with other values, by flat name, whatever the user has named."""
    return config.changed(**values)
