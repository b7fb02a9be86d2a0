"""The table of several processes: speed to one process, peaks, and how far the losses lie apart."""

from __future__ import annotations

from typing import Any

from benchmarks.processes import body
from units import MIB


def case(count: int, is_sharded: bool, speed: float, losses: list[float]) -> dict[str, Any]:
    return {
        "processes": count, "sharded": is_sharded, "peak_bytes": 300 * MIB // count, "planned_bytes": 310 * MIB // count,
        "tokens_per_second": speed, "losses": losses,
    }  # fmt: skip


def test_speed_and_losses_are_told_beside_one_process() -> None:
    cases = [case(1, False, 1000.0, [4.0, 2.0]), case(2, False, 1100.0, [4.0, 2.0]), case(2, True, 900.0, [4.0, 2.002])]
    lines = body(cases).splitlines()[2:]
    assert lines[0].startswith("| 1 | 1,000 | 1.00x | 300.0 MiB")
    assert "| 1.10x | 150.0 MiB | 155.0 MiB | 0.0e+00 |" in lines[1]
    assert lines[2].startswith("| 2, weights shared out | 900 | 0.90x")
    assert lines[2].endswith("1.0e-03 |")
