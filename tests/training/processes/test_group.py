"""Several processes agree on numbers and words; one fails: all end, and each cause is told once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from settings.errors import UserError
from tests.end_to_end.running import ENVIRONMENT
from tests.ranks import run_ranks
from training.processes.group import Group

CHILD = Path(__file__).with_name("group_child.py")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("deed", "cause"), [("refuse", "process 1 of 2"), ("kill", "another process of this run is gone")]
)
def test_one_that_fails_ends_all_and_is_told_once(deed: str, cause: str) -> None:
    codes, texts = zip(*run_ranks(CHILD, 2, deed), strict=True)
    text = "".join(texts)
    assert 0 not in codes and text.count(cause) == 1, text
    advice = "continue with\n    train --is_keep_training=True --run_name=ours"
    assert (advice in text) == (deed == "kill"), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "cause"),
    [("main refuses", "the least is 9 GiB"), ("all refuse", "is wrong everywhere"), ("kill", "SIGKILL")],
)
def test_under_a_launcher_each_cause_is_told_once(deed: str, cause: str) -> None:
    """The launcher has the store in which the first one to end is noted, and names a signal."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, str(CHILD), deed], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and cause in done.stderr, done.stderr
    assert deed == "kill" or done.stderr.count(cause) == 1, done.stderr


def test_one_process_needs_nobody() -> None:
    with pytest.raises(RuntimeError, match="own"), Group() as group:
        assert group.all_reduce_sum(1.0) == [1.0] and group.gather(3) == [3]
        with pytest.raises(UserError), group.first_here():
            group.run_on_main(refused)
        raise RuntimeError("own connection")


def refused() -> None:
    raise UserError("no")
