"""Which optional package is needed, and how does the user get it? Imported on use; missing, its `pip install` line is told."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from language import say
from settings.errors import UserError
from settings.program import python


def needs(package: str, setting: str, *, module: str = "") -> ModuleType:
    """Import an optional package.

    Args:
        package: its name for pip. setting: what asked for it, such as `--format = gguf`. module: its name in Python.
    Raises:
        UserError: it is not installed, or does not load.
    """
    try:
        return import_module(module or package)
    except ImportError as error:
        told = "{setting}, needs the package {package}, which does not load here ({reason}); run: {install}"
        if isinstance(error, ModuleNotFoundError) and error.name == (module or package).partition(".")[0]:
            told = "{setting}, needs the package {package}, which is not installed; run: {install}"
        reason, install = " ".join(str(error).split())[:200], f"{python()} -m pip install {package}"
        raise UserError(say(told, setting=setting, package=package, reason=reason, install=install)) from None
