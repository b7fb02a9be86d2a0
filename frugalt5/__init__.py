"""The program as an installed package: `from frugalt5 import LowMemTrainer, load`, and `frugalt5 train` in a shell.

Its modules import each other by the names that they have in a checkout, such as `config` and `model.t5`. So this puts their folder
on the path: in a process that imports `frugalt5`, these names are the program's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from settings.loading import load
    from trainer_low_mem import LowMemTrainer

__all__ = ["LowMemTrainer", "load"]
_MODULES = {"LowMemTrainer": "trainer_low_mem", "load": "config"}
_HERE = Path(__file__).resolve().parent
_PROGRAM = _HERE / "_program" if (_HERE / "_program").is_dir() else _HERE.parent  # of a wheel, of a checkout

for _path in (*_PROGRAM.glob("*.py"), *(file.parent for file in _PROGRAM.glob("*/__init__.py"))):
    _other = getattr(sys.modules.get(_path.stem), "__file__", None)
    if _other is not None and not Path(_other).resolve().is_relative_to(_PROGRAM):
        raise ImportError(f"frugalt5 has a module {_path.stem} too, and {_other} is imported already; rename that one")
if str(_PROGRAM) not in sys.path:
    sys.path.insert(0, str(_PROGRAM))


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)  # torch is imported with the trainer only
