"""GPU memory in use as the driver's own tool reports it, contexts and libraries included."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PERIOD_MILLISECONDS = 100


@dataclass
class Watched:
    """Bytes of the card that came to be used while it was watched; 0: nobody can tell."""

    peak_bytes: int = 0


@contextmanager
def watched_card(device: str) -> Iterator[Watched]:
    """Watch the first visible NVIDIA card until the context ends; another program on it is counted as well.

    Args:
        device: "cuda"; of others nothing is told.
    """
    seen, tool = Watched(), shutil.which("nvidia-smi") if device == "cuda" else None
    if tool is None:
        yield seen
        return
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    words = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={card}"]
    before = _largest(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    with tempfile.TemporaryFile("w+", encoding="utf8") as told:
        watcher = subprocess.Popen([*words, f"--loop-ms={PERIOD_MILLISECONDS}"], stdout=told, stderr=subprocess.DEVNULL)
        try:
            yield seen
        finally:
            watcher.terminate()
            watcher.wait()
            told.seek(0)
            seen.peak_bytes = max(0, _largest(told.read()) - before)


def _largest(lines: str) -> int:
    """The largest of the numbers that are told, a line each in MiB, in bytes."""
    return max((int(line) for line in lines.split("\n") if line.strip().isdigit()), default=0) * 2**20
