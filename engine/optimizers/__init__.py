"""Which optimizers are there? Each in one file, by the name of its setting.
A new one: a subclass of `base.Optimizer` in a file here, and its line in `OPTIMIZERS`.
`rounding` puts a step smaller than a bf16 weight's last bit into it.
"""

from __future__ import annotations

from engine.optimizers.adafactor import Adafactor
from engine.optimizers.adamw import AdamW, AdamW8bit, AdamWRMS
from engine.optimizers.base import Optimizer, Step
from engine.optimizers.sinkgd import SinkGD

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adafactor": Adafactor,
    "adamw_rms": AdamWRMS,
    "adamw_8bit": AdamW8bit,
    "adamw": AdamW,
    "sinkgd": SinkGD,
}
PEAK_LEARNING_RATES = {
    "adafactor": 1e-2,
    "adamw_rms": 2e-2,
    "adamw_8bit": 2e-2,
    "adamw": 3e-4,
    "sinkgd": 1e-2,
}  # where learning_rate is auto

__all__ = ["OPTIMIZERS", "PEAK_LEARNING_RATES", "Optimizer", "Step"]
