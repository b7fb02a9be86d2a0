"""Children that begin with torch and the program imported: a fork server spares each of them the seconds that this
takes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from devices.environment import prepare_environment

IMPORTED = ["torch", "accelerate", "trainer_low_mem", "training.setup.build", "commands.evaluate", "commands.generate"]
PRELOADED = [*IMPORTED, "tests.imports_set_aside"]
ROOT = Path(__file__).resolve().parent.parent


def trust_the_disk() -> None:
    """Wait for no disk in this process: no power is lost in tests, and the waiting is a tenth of their time."""
    os.fsync = lambda handle: None  # type: ignore[assignment]


def set_imports_aside() -> None:
    """Let collections of garbage look through nothing that is there now, which stays to the end: a run collects often,
    and each time half a million objects that were imported would be looked through.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _run(
    program: str | Path, words: Sequence[str], out: Path, error: Path, environment: Mapping[str, str], folder: Path
) -> None:
    os.chdir(folder)
    trust_the_disk()
    for handle, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), handle)
    # Those of the fork server were made for files, in which one can seek; here there may be pipes.
    sys.stdout = open(1, "w", buffering=1, encoding="utf8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(program), *words]
    if isinstance(program, Path):
        prepare_environment()  # as the import of the trainer did in the fork server, with another environment
    import torch

    torch.set_num_threads(1)
    if isinstance(program, Path):
        runpy.run_path(str(program), run_name="__main__")
    else:
        exec(compile(program, "<child>", "exec"), {"__name__": "__main__"})


def start(
    program: str | Path,
    words: Sequence[str],
    out: Path,
    error: Path,
    environment: Mapping[str, str],
    folder: Path = ROOT,
) -> BaseProcess:
    """Run code, or a file of it, in a child process.

    Args:
        words: its `sys.argv[1:]`. out, error: files for what it prints. environment: all of its variables. folder:
            where it runs.
    """
    context = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    child = context.Process(target=_run, args=(program, list(words), out, error, dict(environment), folder))
    child.start()
    return child


def run(
    program: str | Path, words: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; arguments as of `start`."""
    with tempfile.TemporaryDirectory() as place:
        out, error = Path(place, "out"), Path(place, "error")
        child = start(program, words, out, error, environment, folder)
        child.join()
        assert child.exitcode is not None
        texts = (path.read_text(encoding="utf8") for path in (out, error))
        return subprocess.CompletedProcess([str(program), *words], child.exitcode, *texts)
