"""The table of speeds of writing: each of ours beside the peer that it is compared with."""

from __future__ import annotations

from benchmarks.generation import SYSTEMS, table


def test_each_is_compared_with_its_peer() -> None:
    speeds = dict(zip(SYSTEMS, (100.0, 20.0, 120.0, 90.0, 80.0), strict=True))
    head, _, row = table([{"case": "1 x 64 tokens, greedy", **speeds}]).splitlines()
    assert head.endswith("| fp32 to transformers fp32 | bf16 to transformers bf16 | int8 to transformers fp32 |")
    assert row.endswith("| 100.0 | 20.0 | 120.0 | 90.0 | 80.0 | 1.20x | 4.50x | 0.80x |")
