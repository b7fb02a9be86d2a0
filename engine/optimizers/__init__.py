"""The rule of each optimizer, one file each. Which there are, and what they take, is the table of
`settings/optimizers.py`: a new one is an entry there and a subclass of `base.Optimizer` in a file here.
`rounding` puts a step smaller than a bf16 weight's last bit into it.
"""

from __future__ import annotations

from importlib import import_module

from engine.optimizers.base import Optimizer, Step
from settings import optimizers

__all__ = ["OPTIMIZERS", "Optimizer", "Step"]


OPTIMIZERS: dict[str, type[Optimizer]] = {}
for _name, _facts in optimizers.OPTIMIZERS.items():
    _module, _, _class = _facts.made_by.partition(":")
    OPTIMIZERS[_name] = getattr(import_module(f"{__name__}.{_module}"), _class)
