"""What a launcher says in the environment is read, and refused where it would end in a library's traceback."""

from __future__ import annotations

import pytest

from training.processes.launch import SIZES, launch_problems


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, ""),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "RANK = 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = two"),
    ],
)
def test_a_launch_without_a_meeting_point_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], problem: str
) -> None:
    for name in (*SIZES, "RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    problems = launch_problems()
    assert len(problems) == bool(problem) and all(problem in problem for problem in problems)
