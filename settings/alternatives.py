"""Settings as they would be with other values: what a user might try, planned as if it were typed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from settings.declared import Config
from settings.precedence import model_presets


def with_changes(config: Config, model_preset: str | None = None, **values: Any) -> Config:
    """The same settings with other values by flat name; a `model_preset` brings the shape of its model."""
    shape = {} if model_preset is None else model_presets()[model_preset]
    other = config.changed(**{**shape, **values})
    return replace(other, model_preset=model_preset or config.model_preset)
