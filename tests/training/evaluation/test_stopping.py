from __future__ import annotations

import json
import math

from training.evaluation.stopping import BestMetric


def run(best: BestMetric, numbers: list[float], first: int = 1) -> list[tuple[bool, bool]]:
    return [
        (best.is_best(step, {best.metric: number, "other": 0.0}), best.should_stop)
        for step, number in enumerate(numbers, first)
    ]


def test_patience_counts_evaluations_in_a_row() -> None:
    best = BestMetric("loss", patience=2)
    assert [stop for _, stop in run(best, [3.0, 3.1, 2.0, 2.1, 2.2])] == [False, False, False, False, True]
    assert (best.value, best.step, best.evals_since) == (2.0, 3, 2)
    (remark,) = best.remarks(5)
    assert "2 evaluations" in remark and "loss 2.0000 at step 3" in remark


def test_what_is_no_number_is_never_the_best() -> None:
    best = BestMetric("loss", patience=3)
    assert [new for new, _ in run(best, [math.nan, math.inf, 5.0, math.nan])] == [False, False, True, False]


def test_a_resumed_run_stops_where_an_unbroken_one_does() -> None:
    cut = 3
    numbers = [5.0, 4.0, 4.5, 4.2, 3.9, 4.0, 4.1, 4.3]
    whole, first = BestMetric("loss", 3), BestMetric("loss", 3)
    expected = run(whole, numbers)
    run(first, numbers[:cut])
    second = BestMetric.restore("loss", 3, json.loads(json.dumps(first.state())))
    assert run(second, numbers[cut:], cut + 1) == expected[cut:]
    assert second == whole
