"""A child answers, keeps to its limits, hands on a user's error as it is, and ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from settings.errors import DoesNotFit, UserError
from support.child_process import FAILED, MEMORY, TIME, ChildDied, Worker, call, stay_within

ROOT = Path(__file__).resolve().parents[2]


def refuse(kind: type[UserError]) -> None:
    raise kind("--setting = 1, is wrong", "--other = 2, too")


def hold(size: int) -> int:
    return len(bytearray(size))


def hold_within(size: int, most: int) -> int:
    threading.Thread(target=stay_within, args=(most,), daemon=True).start()
    return sum(map(len, [b"x" * 2**20 for _ in range(size // 2**20)]))


def compute() -> None:
    while True:
        pass


def counting(first: int) -> object:
    return lambda step: (first + step, os.getpid())


@pytest.mark.parametrize("kind", [UserError, DoesNotFit])
def test_an_error_of_the_user_keeps_its_kind_and_its_problems(kind: type[UserError]) -> None:
    with pytest.raises(kind) as caught:
        call(refuse, kind)
    assert caught.value.exit_code == kind.exit_code and len(caught.value.problems) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the system")
def test_limits_of_memory_and_time() -> None:
    for reason, function, arguments, limits in (
        (MEMORY, hold, (2**31,), {"max_bytes": 2**28}),
        (MEMORY, hold_within, (2**29, 2**28), {}),
        (TIME, compute, (), {"max_cpu": 1}),
        (FAILED, os._exit, (3,), {}),
    ):
        with pytest.raises(ChildDied) as caught:
            call(function, *arguments, **limits)  # type: ignore[arg-type]
        assert caught.value.reason == reason
    assert call(hold, 2**20, max_bytes=2**28, max_cpu=60) == call(hold_within, 2**20, 2**28) == 2**20


def test_a_worker_is_made_once_and_asked_often() -> None:
    with Worker(counting, 5) as worker:
        answers = [worker.ask(step) for step in range(3)]
    assert [number for number, _ in answers] == [5, 6, 7] and len({pid for _, pid in answers}) == 1
    assert not psutil.pid_exists(answers[0][1])


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_child_ends_with_its_parent_however_that_ends() -> None:
    code = (
        "import os; from support import child_process; w = child_process.Worker(os.path.join); "
        "print(w._process.pid, flush=True); w._process.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    assert child.wait(30) is not False
