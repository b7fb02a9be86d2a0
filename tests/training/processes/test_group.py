"""Several processes agree on numbers and words; one fails: all end, and each cause is told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings.errors import UserError
from tests.ranks import run_ranks
from training.processes.group import Group

CHILD = Path(__file__).with_name("group_child.py")


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("refuse", "process 1 of 2"),
        ("main refuses", "the least is 9 GiB"),
        ("all refuse", "is wrong everywhere"),
        ("kill", "another process of this run is gone"),
    ],
)
def test_one_that_fails_ends_all_and_is_told_once(deed: str, cause: str) -> None:
    codes, texts = zip(*run_ranks(CHILD, 2, deed), strict=True)
    text = "".join(texts)
    assert 0 not in codes and text.count(cause) == 1, text
    advice = "continue with\n    train --is_keep_training=True --run_name=ours"
    assert (advice in text) == (deed == "kill"), text


def test_one_process_needs_nobody() -> None:
    with pytest.raises(RuntimeError, match="own"), Group() as group:
        assert group.all_reduce_sum(1.0) == [1.0] and group.gather(3) == [3]
        with pytest.raises(UserError), group.first_here():
            group.run_on_main(refused)
        raise RuntimeError("own connection")


def refused() -> None:
    raise UserError("no")
