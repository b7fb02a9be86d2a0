"""Settings as they would be with other values: what a user might try, planned as if it were typed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from settings.declared import Config
from settings.precedence import model_presets


def with_changes(config: Config, **values: Any) -> Config:
    """The same settings with other values by flat name; `model_preset` brings the shape of its model."""
    preset = values.pop("model_preset", None)
    if preset is not None:
        config = replace(config, model_preset=preset)
        values = {**model_presets()[preset], **values}
    return config.changed(**values)
