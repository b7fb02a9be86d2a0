"""What an evaluation is shown as."""

from __future__ import annotations

import math

import pytest

from training.evaluation.losses import Evaluation


@pytest.mark.parametrize(
    ("perplexity", "text"), [(8.1234, "8.12"), (1234.5, "1,234.50"), (1.23e7, "1.2e7"), (1.2e15, "1.2e15")]
)
def test_a_large_perplexity_is_short(perplexity: float, text: str) -> None:
    assert Evaluation(math.log(perplexity), 1, 1).shown_perplexity() == text
