"""What sentence-transformers answers, in the Python that an environment variable names (see CONTRIBUTING.md); where
there is none, the test is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

PYTHON = os.environ.get("FRUGALT5_SENTENCE_TRANSFORMERS_PYTHON", "")
SCRIPT = Path(__file__).with_name("in_sentence_transformers.py")
Arrays = dict[str, NDArray[np.float32]]


def ask_sentence_transformers(scratch: Path, **job: Any) -> tuple[dict[str, Any], Arrays]:
    """The answer to a job of `in_sentence_transformers.py`, and its arrays.

    Args:
        scratch: a folder for the files of the job.
    """
    if not PYTHON:
        pytest.skip("FRUGALT5_SENTENCE_TRANSFORMERS_PYTHON names no Python with sentence-transformers")
    arrays = scratch / "arrays.npz"
    arrays.unlink(missing_ok=True)
    path = scratch / "job.json"
    path.write_text(json.dumps({**job, "arrays": str(arrays)}, default=str))
    done = subprocess.run([PYTHON, str(SCRIPT), str(path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if not arrays.is_file():
        return answer, {}
    with np.load(arrays) as content:
        return answer, dict(content)
