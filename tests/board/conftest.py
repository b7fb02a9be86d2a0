"""The process that runs the tests stands for runs that began when the recorded ones did."""

from __future__ import annotations

import psutil
import pytest

from tests.board.recorded import BEGAN


@pytest.fixture(autouse=True)
def began_before_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: BEGAN - 60)
