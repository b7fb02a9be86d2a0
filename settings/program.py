"""What one types to start this program, the Python that has its packages, and what installs one that is missing.

`make` puts them into `.venv`, which a shell does not know of unless it was activated; and some systems have no
`python`, but `python3`. So a command that is shown may be typed as it stands, and who types another Python is told
which one to take. Installed by pip, the program is called `frugalt5`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from settings.errors import UserError
from support.language import say

ROOT = Path(__file__).resolve().parent.parent
VENV = ".venv"
FILE = "train_low_mem.py"
IN_VENV = Path(VENV, "Scripts", "python.exe") if os.name == "nt" else Path(VENV, "bin", "python")
PACKAGE = "frugalt5"
PREFIX = __name__.removesuffix("settings.program")  # It is "frugalt5." in the package, and empty in a checkout.
IS_INSTALLED = PREFIX != ""
SCRIPT = f"-m {PACKAGE}" if IS_INSTALLED else FILE  # These words follow torchrun and accelerate launch.
NAME = PACKAGE if IS_INSTALLED else FILE


def full_name(module: str) -> str:
    """The name that a module of this program is imported by: `config` is `frugalt5.config` in the installed package."""
    return f"{PREFIX}{module}"


def python_command(code: str) -> list[str]:
    """The words that run code in a fresh Python, which finds this program's modules where this process found them.

    The folder that one is in is not searched, nor is that of an installed package for anything but the package: what
    lies there may be called like a module that some library wants.
    """
    top = sys.modules[__name__.partition(".")[0]]
    folder = str(Path(str(top.__file__)).resolve().parents[1])
    search = f"import sys; sys.path[:] = [{folder!r}, *filter(None, sys.path)]; import {top.__name__}"
    if IS_INSTALLED:
        search += "; del sys.path[0]"
    return [sys.executable, "-c", f"{search}; {code}"]


def start_command() -> list[str]:
    """The words that start this program as a child, before the name of a command."""
    if IS_INSTALLED:
        return python_command(f"from {PACKAGE}.__main__ import main; main()")
    return [sys.executable, str(ROOT / FILE)]


def python() -> str:
    """The word for the Python that runs this, as it may be typed here."""
    active = shutil.which("python")
    if active is not None and Path(active).parent == Path(sys.prefix, IN_VENV.parent.name):
        return "python"
    if _is_here(Path(VENV), sys.prefix):
        return str(IN_VENV)
    if sys.prefix == sys.base_prefix:  # The Python of an environment is a link to that of the system.
        for word in ("python", "python3"):
            if _is_here(Path(shutil.which(word) or ""), sys.executable):
                return word
    return shlex.quote(sys.executable or "python")


def program() -> str:
    """The head of every command that is shown."""
    if IS_INSTALLED:
        command = shutil.which(PACKAGE)
        is_ours = command is not None and _is_here(Path(command).parent, sysconfig.get_path("scripts"))
        return PACKAGE if is_ours else f"{python()} {SCRIPT}"
    return f"{python()} {FILE if _is_here(Path(FILE), ROOT / FILE) else shlex.quote(str(ROOT / FILE))}"


def _is_here(path: Path, other: str | Path) -> bool:
    with suppress(OSError):
        return path.samefile(other)
    return False


def missing(error: ModuleNotFoundError, arguments: Sequence[str]) -> str:
    """What to do about a package that is not installed for this Python; empty where none is missing.

    Args:
        arguments: that this program was started with.
    """
    package = (error.name or "").partition(".")[0]
    is_own = package == PACKAGE or (ROOT / package).is_dir() or (ROOT / f"{package}.py").is_file()
    if not package or is_own:
        return ""
    facts = {"package": package, "python": sys.executable}
    if IS_INSTALLED:
        return say("{package}, is not installed for {python}; install it: {python} -m pip install {package}", **facts)
    if (ROOT / IN_VENV).is_file() and Path(sys.prefix) != ROOT / VENV:
        folder = Path() if Path.cwd() == ROOT else ROOT
        command = shlex.join([str(folder / IN_VENV), str(folder / FILE), *arguments])
        text = "{package}, is not installed for {python}, but it is in {folder}: {command}"
        return say(text, folder=ROOT / VENV, command=command, **facts)
    text = (
        "{package}, is not installed for {python}; `make train` installs everything into .venv, or run {python} "
        "-m pip install -r requirements.txt -c constraints.txt"
    )
    return say(text, **facts)


def needs(package: str, setting: str, *, module: str = "", install: Sequence[str] = ()) -> ModuleType:
    """Import an optional package.

    Args:
        package: its name for pip. setting: what asked for it, such as `--format = gguf`. module: its name in Python.
        install: all packages that the setting needs, so that one command installs them; none: this one alone.
    Raises:
        UserError: it is not installed, or does not load.
    """
    try:
        return import_module(module or package)
    except ImportError as error:
        text = "{setting}, needs the package {package}, which does not load here ({reason}); run: {install}"
        if isinstance(error, ModuleNotFoundError) and error.name == (module or package).partition(".")[0]:
            text = "{setting}, needs the package {package}, which is not installed; run: {install}"
        raise UserError(
            text,
            setting=setting,
            package=package,
            reason=" ".join(str(error).split())[:200],
            install=f"{python()} -m pip install {' '.join(install or [package])}",
        ) from None
