"""Runs a script as several processes of one group on this machine, over gloo, without a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_ranks(script: Path, count: int, *words: str, kill_last: bool = False) -> list[tuple[int, str]]:
    """Exit code and messages of each process. The store lives in process 0.

    Args:
        kill_last: end all others once process 0 has ended.
    """
    shared = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    children = [
        subprocess.Popen(
            [sys.executable, str(script), *words], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        texts = [children[0].communicate(timeout=100)[1]]
        for child in children[1:]:
            if kill_last:
                child.kill()
            texts.append(child.communicate(timeout=100)[1])
        return [(child.returncode, text) for child, text in zip(children, texts, strict=True)]
    finally:
        for child in children:
            child.kill()
            child.wait()


def must_succeed(script: Path, count: int, *words: str) -> None:
    """Run processes that end with 0."""
    for code, text in run_ranks(script, count, *words):
        assert code == 0, text
