"""Runs a script as several processes of one group on this machine, over gloo, without a launcher."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from tests import warm
from tests.warm import ROOT


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_ranks(script: Path, count: int, *words: str) -> list[tuple[int, str]]:
    """Exit code and messages of each process. The store lives in process 0."""
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "ACCELERATE_USE_CPU": "true",
    }
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder, f"error {rank}") for rank in range(count)]
        children = [
            warm.start(script, words, Path(os.devnull), error, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, error in enumerate(errors)
        ]
        try:
            for child in children:
                child.join(100)
            codes = [child.exitcode if child.exitcode is not None else -1 for child in children]
            return [(code, error.read_text(encoding="utf8")) for code, error in zip(codes, errors, strict=True)]
        finally:
            for child in children:
                child.kill()
                child.join()


def must_succeed(script: Path, count: int, *words: str) -> None:
    """Run processes that end with 0."""
    for code, text in run_ranks(script, count, *words):
        assert code == 0, text
