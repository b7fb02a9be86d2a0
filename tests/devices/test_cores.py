"""With how many threads products compute: as asked for, as the environment says, or a thread for each real core."""

from __future__ import annotations

import pytest

from devices.cores import computing_threads, usable_cores
from settings.fields import AUTO


@pytest.mark.parametrize("said, threads", [("3", 3), ("5,2", 5)])
def test_the_environment_says(said: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert computing_threads(AUTO) == threads
    assert computing_threads(7) == 7, "what is asked for comes first"


@pytest.mark.parametrize("said", ["", "0", "many"])
def test_else_a_thread_for_each_real_core(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    for real, threads in ((1, 1), (1000, usable_cores()), (None, usable_cores())):
        monkeypatch.setattr("psutil.cpu_count", lambda logical, real=real: real)
        assert computing_threads() == threads
