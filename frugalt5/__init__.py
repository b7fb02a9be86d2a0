"""The program as a package: `from frugalt5 import LowMemTrainer, Model, load`, and `frugalt5 train` in a shell.

All its modules lie below this name, as `frugalt5.data.dataset` and `frugalt5.model.t5`; `sys.path` and the user's own
`config` and `data` stay as they are. In a wheel they are files of this folder, in a checkout they lie beside it
(`checkout.py`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.model import Model
    from settings.errors import UserError
    from settings.loading import load
    from trainer_low_mem import LowMemTrainer, plot

__all__ = ["LowMemTrainer", "Model", "UserError", "load", "plot"]
_MODULES = {
    "LowMemTrainer": "trainer_low_mem",
    "Model": "serving.model",
    "UserError": "settings.errors",
    "load": "settings.loading",
    "plot": "trainer_low_mem",
}
_SUBMODULES = ("config", "data", "memory", "model", "trainer_low_mem")
_HERE = Path(__file__).resolve().parent

if not (_HERE / "train_low_mem.py").is_file():
    from frugalt5.checkout import CheckoutFinder

    __path__.append(str(_HERE.parent))
    sys.meta_path.insert(0, CheckoutFinder(_HERE.parent))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(
            import_module(f"{__name__}.{_MODULES[name]}"), name
        )  # Torch is imported with the trainer and a model.
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])
