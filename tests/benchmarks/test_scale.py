"""The simulator of many devices: closed forms where there are any, and no free lunch."""

from __future__ import annotations

import math

import pytest

from benchmarks.scale import RANKS, Cluster, half_reduce, main, ring, simulate, table, tree
from config import load
from memory.cost.prediction import Choice, Work, step_flops
from model.shapes import weight_counts

CONFIG = load("train", {"model_preset": "t5-base", "preset": "none"})
WORK = Work(CONFIG.model, 8, 512, 114, False, "adafactor")


def choice(shards: int) -> Choice:
    return Choice(8, 1, 1, 0, 8, "bfloat16", "bfloat16", 2**25, shards=shards)


def test_closed_forms() -> None:
    assert 2 * ring(1e9, 4, 1e9, 1e-3) == pytest.approx(2 * (3 / 4 + 3e-3))
    assert 2 * tree(1e9, 8, 1e9, 1e-3) == pytest.approx(2 * (1 + 3e-3))
    assert ring(1e9, 1, 1e9, 1.0) == tree(1e9, 1, 1e9, 1.0) == 0
    cluster = Cluster(per_host=2, inside=1e9, between=1e8, latency_inside=0, latency_between=0)
    assert half_reduce(1e9, 4, cluster) == pytest.approx(0.5 + 5.0)


def test_one_device_only_computes() -> None:
    blocks, head = step_flops(CONFIG.model, 8, 512, 114)
    step = simulate(CONFIG.model, WORK, 1, Cluster(), choice(1))
    assert step.seconds == step.computing == pytest.approx((4 * blocks + 3 * head) / Cluster().flops)


def test_slow_links_are_waited_for() -> None:
    """Nothing is hidden where computing takes no time: the step is the bytes over the rate."""
    cluster = Cluster(flops=1e30, per_host=1, between=1e9, latency_between=0)
    counts = weight_counts(CONFIG.model)
    sent = 12 * (counts["encoder"] + counts["decoder"]) + counts["embedding"]
    step = simulate(CONFIG.model, WORK, 2, cluster, choice(1))
    assert step.seconds == pytest.approx(2 * 2 * 0.5 * sent / 1e9, rel=1e-6)
    assert step.waiting == pytest.approx(step.seconds)


@pytest.mark.parametrize("sharded", [False, True])
def test_more_devices_are_faster_together_and_no_faster_each(sharded: bool) -> None:
    lines = table(CONFIG, 8, 512, 114, Cluster(), sharded)
    seconds, speeds = ([float(line[k].replace(",", "")) for line in lines] for k in (1, 4))
    assert [line[0] for line in lines] == [f"{ranks:,}" for ranks in RANKS]
    assert seconds == sorted(seconds) and speeds == sorted(speeds)
    assert all(math.isfinite(speed) for speed in speeds)


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model=t5-small", "--rows=4"]) == 0
    text = capsys.readouterr().out
    assert "sharded" in text and text.count("| 1,024 |") == 2
