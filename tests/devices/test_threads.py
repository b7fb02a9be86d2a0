"""As many threads as other programs leave; a number that somebody has named is kept."""

from __future__ import annotations

import pytest
import torch

from devices.threads import Threads, fitting_threads

MOST = 8


@pytest.mark.parametrize(
    ("cores", "cores_before", "now", "expected"),
    [
        (7.6, 8.0, 8, 8),  # a browser that does little
        (6.4, 8.0, 8, 6),
        (0.2, 8.0, 8, 1),  # never none
        (8.0, 0.2, 1, 1),  # more only after two looks
        (2.7, 2.9, 2, 2),  # not enough for a third thread, nor too little for the second
    ],
)
def test_threads_that_each_have_a_core(cores: float, cores_before: float, now: int, expected: int) -> None:
    assert fitting_threads(cores, cores_before, now, MOST) == expected


@pytest.mark.parametrize(("requested", "variable"), [(2, None), ("auto", "2")])
def test_a_number_that_is_named_is_kept(
    monkeypatch: pytest.MonkeyPatch, requested: int | str, variable: str | None
) -> None:
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        threads = Threads(requested)
        threads.follow()
        assert threads.is_fixed and (threads.now, threads.most, torch.get_num_threads()) == (2, 2, 2)
    finally:
        torch.set_num_threads(before)
