"""The compiled kernels: where they are and how they are made.

The sources are compiled for this very processor, once, into the user's cache; the name of the file holds a hash of
sources, flags, compiler and processor, so nothing stale is ever loaded. Facts decide whether there are kernels (system,
compiler, class of processor, the setting), never a stopwatch. The library is linked against the OpenMP runtime that
torch brings along: two runtimes would mean two pools of threads that wait for each other.
Torch is not imported here: a process compiles best before it has grown.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from subprocess import SubprocessError

from devices import machine_file, processor
from settings.errors import reason_of
from support.child_process import run
from support.language import say
from support.storage import atomic_file, locked

FOLDER = Path(__file__).parent
SOURCES = ("attention.c", "decoding.c", "int4.c", "pointwise.c")
HEADERS = ("common.h",)
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("gcc", "cc")  # They know the vector types of GNU C.
SECONDS = 120  # A compiler may take so long.


class NoKernels(Exception):
    """There are none here; the text says why."""


def library(environ: Mapping[str, str] = os.environ) -> Path:
    """The compiled library, made now where there is none yet.

    Args:
        environ: the process's own unless a test says otherwise.
    Raises:
        NoKernels: this system, processor or environment has none.
    Memory: the compiler's, about 80 MiB in a child for two seconds.
    """
    runtime, compiler, target = _ingredients(environ)
    name = f"kernels-{_digest(compiler, target, str(runtime))}.so"
    try:
        path = machine_file.location(environ).with_name(name)
        if not _is_ours(path):
            _compile(compiler, target, runtime, path)
    except OSError as error:
        raise NoKernels(say("the compiled kernels cannot be kept: {error}", error=error)) from None
    return path


@lru_cache(maxsize=1)
def library_here() -> tuple[Path | None, str]:
    """This process's library, looked for or made once.

    A command that computes calls it before torch is imported: a compiler beside a process that has grown could exceed
    the limit that both run under, and what was refused then is not tried again when there is less room.

    Returns:
        the library, or None and why there is none.
    """
    try:
        return library(), ""
    except NoKernels as reason:
        return None, reason_of(reason)


def why_impossible(environ: Mapping[str, str] = os.environ) -> str:
    """What is missing to have kernels here; empty where nothing is. Nothing is made."""
    try:
        _ingredients(environ)
    except NoKernels as reason:
        return reason_of(reason)
    return ""


def _ingredients(environ: Mapping[str, str]) -> tuple[Path, str, tuple[str, ...]]:
    """OpenMP's runtime, the compiler, and its flags for this processor."""
    if sys.platform != "linux":
        raise NoKernels(say("compiled kernels are built on Linux only"))
    return openmp_runtime(), compiler_of(environ), _target(environ)


def compiler_of(environ: Mapping[str, str]) -> str:
    """The C compiler: CC where it is set."""
    names = [environ["CC"]] if environ.get("CC") else COMPILERS
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise NoKernels(say("no C compiler was found (on Debian and Ubuntu: apt install gcc)"))
    return path


def openmp_runtime() -> Path:
    """The OpenMP runtime that torch loads."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent
        inside = sorted(folder.glob("lib/libgomp*.so*"))
        beside = sorted(folder.parent.glob("torch.libs/libgomp*.so*"))
        libraries = [*inside, *beside]
        if libraries:
            return libraries[0]
    raise NoKernels(say("torch brings no GNU OpenMP runtime along"))


def _target(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Flags for the processor, or for the lower one that the environment asks for."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    flags = processor.flags_of() or frozenset()
    if not {"avx2", "fma"} <= flags or environ.get("ATEN_CPU_CAPABILITY", "").lower() == "default":
        raise NoKernels(say("compiled kernels need AVX2 and FMA"))
    if processor.here(environ) == processor.AVX2:
        return ("-march=x86-64-v3",)
    return ("-march=native", "-mprefer-vector-width=512")


def _digest(compiler: str, target: tuple[str, ...], runtime: str) -> str:
    parts = [_run([compiler, "--version"]), *FLAGS, *target, runtime, processor.name_of()]
    parts += sorted(processor.flags_of() or ())
    parts += [(FOLDER / name).read_text(encoding="utf8") for name in (*HEADERS, *SOURCES)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_ours(path: Path) -> bool:
    """Whether the file is there and nobody else could have written it: it will run as part of this process."""
    try:
        facts = path.stat()
    except OSError:
        return False
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _compile(compiler: str, target: tuple[str, ...], runtime: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = say("another process compiles the kernels: waiting until it is done")
    # Of several processes one compiles, and the others find the file.
    with locked(path.with_name("kernels.lock"), waiting):
        if _is_ours(path):
            return
        with atomic_file(path) as fresh, tempfile.TemporaryDirectory() as objects:
            for name in SOURCES:
                _run([compiler, *FLAGS, *target, "-c", str(FOLDER / name), "-o", f"{objects}/{name}.o"])
            parts = [f"{objects}/{name}.o" for name in SOURCES]
            _run([compiler, "-shared", *parts, str(runtime), "-lm", "-o", str(fresh)])
            fresh.chmod(0o755)


def _run(command: list[str]) -> str:
    try:
        done = run(command, SECONDS)
    except (OSError, SubprocessError) as error:  # It may be of another architecture, or no process may be made.
        raise NoKernels(say("{program} does not run: {error}", program=command[0], error=error)) from None
    if done.returncode:
        raise NoKernels(say("{program} failed: {error}", program=command[0], error=done.stderr.strip()[:300]))
    return done.stdout
