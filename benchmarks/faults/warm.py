"""The real command, run hundreds of times in forks of a process that has imported its modules.

What is forked has made no tensor and started no thread; everything else (settings, data, plan, model, loop) is the
command's own.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.faults.disk_faults import Fault, start


def load() -> None:
    """Import what the commands import; once."""
    if gc.get_freeze_count():
        return
    import torch

    with suppress(ImportError):  # pyarrow does, where it is there
        importlib.import_module("pandas")

    import train_low_mem
    import trainer_low_mem

    assert train_low_mem and trainer_low_mem
    for name in ("chat", "check", "convert", "evaluate", "generate", "merge", "prepare", "quantize", "tokenizer"):
        importlib.import_module(f"commands.{name}")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is imported is not looked through again in each fork


def run(words: Sequence[str], screen: Path, fault: Fault | None = None) -> int:
    """Run `train_low_mem.py WORDS` in a fork, and wait for it.

    Args:
        screen: file for what it shows. fault: what happens to it.
    Returns:
        its exit code; of one that a signal has ended, the signal's number, negative.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _child(words, screen, fault)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class _Here:
    """What reads and prepares rows is the process to which the fault happens, in place of a child of its own."""

    def __init__(self, *made: Any, **limits: Any) -> None:
        pass

    def ask(self, request: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        function, arguments = request
        return function(*arguments), set()

    def close(self) -> None:
        pass


def _child(words: Sequence[str], screen: Path, fault: Fault | None) -> int:
    import train_low_mem
    from data.prepare import looking

    looking.Worker = _Here  # type: ignore[assignment, attr-defined]
    with screen.open("wb") as shown:
        for stream in (1, 2):
            os.dup2(shown.fileno(), stream)
    if fault is not None:
        start(fault)
    return train_low_mem.main(list(words))
