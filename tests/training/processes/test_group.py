"""Several processes agree on numbers and words; one fails: all end, and each cause is told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks

CHILD = Path(__file__).with_name("group_child.py")


@pytest.mark.parametrize(
    ("deed", "cause"), [("refuse", "process 1 of 2"), ("kill", "another process of this run is gone")]
)
def test_one_that_fails_ends_all_and_is_told_once(deed: str, cause: str) -> None:
    codes, texts = zip(*run_ranks(CHILD, 2, deed), strict=True)
    text = "".join(texts)
    assert 0 not in codes and text.count(cause) == 1, text
    advice = "continue with\n    train --is_keep_training=True --run_name=ours"
    assert (advice in text) == (deed == "kill"), text
