"""Several processes agree on numbers and words; one fails: all end, and each cause is told once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from settings.errors import UserError
from tests.end_to_end.running import ENVIRONMENT
from training.processes.group import Group

CHILD = Path(__file__).with_name("group_child.py")
ROOT = Path(__file__).resolve().parents[3]


def run_two(deed: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, str(CHILD), deed], env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("refuse", "process 1 of 2"),
        pytest.param("main refuses", "the least is 9 GiB", marks=pytest.mark.slow),
        pytest.param("all refuse", "is wrong everywhere", marks=pytest.mark.slow),
    ],
)
def test_a_refusal_ends_all_and_is_told_once(deed: str, cause: str) -> None:
    done = run_two(deed)
    assert done.returncode != 0
    assert done.stderr.count(cause) == 1, done.stderr
    assert "continue with" not in done.stderr, "nothing else is told"


def test_a_killed_process_ends_all(tmp_path: Path) -> None:
    done = run_two("kill")
    assert done.returncode != 0
    assert done.stderr.count("another process of this run is gone") == 1, done.stderr
    assert "continue with\n    train --is_keep_training=True --run_name=ours" in done.stderr
    assert "SIGKILL" in done.stderr, "the launcher names it"


def test_one_process_needs_nobody() -> None:
    with pytest.raises(RuntimeError, match="own"), Group() as group:
        assert group.all_reduce_sum(1.0) == [1.0] and group.gather(3) == [3]
        with pytest.raises(UserError), group.first_here():
            group.run_on_main(refused)
        raise RuntimeError("own connection")


def refused() -> None:
    raise UserError("no")
