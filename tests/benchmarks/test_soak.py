"""What counts as growing: the last quarter beside the second one, in units of a fixed piece of work."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faults.soak import Sample, body, left_behind, problems_of, quarters_of, stepping_seconds
from units import MIB


def samples(slower: float = 1.0) -> list[Sample]:
    """40 windows of 100 steps on a processor that others slow down by half in the second half; the last quarter takes longer."""
    found, seconds = [], 0.0
    for number in range(41):
        disturbed = 1.5 if number >= 20 else 1.0
        found.append(Sample(100 * number + 1, seconds, 200 * MIB, 5, 8, 20, 0.01 * disturbed))
        seconds += 100 * 0.02 * disturbed * (slower if number >= 30 else 1.0)
    return found


def test_other_programs_do_not_count_and_a_slower_step_does() -> None:
    flat = quarters_of(samples())
    assert problems_of(flat) == [] and [quarter.step_yardsticks for quarter in flat] == pytest.approx(
        [2.0] * 4, rel=0.001
    )
    assert problems_of(quarters_of(samples(1.015))) == []
    (told,) = problems_of(quarters_of(samples(1.03)))
    assert "a step takes +3.0% (± 0.0%) processor time" in told
    text = body(flat, [], 41)
    assert text.count("\n| ") == 4 and "Flat: a step of the last quarter takes +0.0% (± 0.0%)" in text


def test_threads_that_watch_do_not_count(tmp_path: Path) -> None:
    for thread, spent in ((41, "2500000000 7 3\n"), (42, "9000000000 7 3\n")):
        (tmp_path / "41" / "task" / str(thread)).mkdir(parents=True)
        (tmp_path / "41" / "task" / str(thread) / "schedstat").write_text(spent)
    assert stepping_seconds(41, tmp_path) == 2.5
    if Path("/proc/self/schedstat").is_file():
        assert stepping_seconds(os.getpid()) > 0


def test_what_noise_hides_is_not_told_as_growth() -> None:
    noisy = [
        replace(one, yardstick_seconds=one.yardstick_seconds * (1.3 if at % 3 else 0.8))
        for at, one in enumerate(samples(1.03))
    ]
    quarters = quarters_of(noisy)
    assert problems_of(quarters) == [] and quarters[3].yardsticks_error > 0.1


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [("anon_bytes", 3 * MIB, "memory has grown by 3.0 MiB"), ("threads", 1, "threads: 5, then 6"),
     ("open_files", 1, "open files: 8, then 9"), ("files", 2, "files in its folders: 20, then 22")],
)  # fmt: skip
def test_what_grows_is_told(name: str, more: int, told: str) -> None:
    found = samples()
    grown = [*found[:-6], *(replace(sample, **{name: getattr(sample, name) + more}) for sample in found[-6:])]
    assert problems_of(quarters_of(grown)) == [told]


def test_a_file_that_is_open_for_a_moment_is_not_growth() -> None:
    found = samples()
    assert problems_of(quarters_of([*found[:-6], replace(found[-6], open_files=12), *found[-5:]])) == []


def test_what_is_left_behind_is_named(tmp_path: Path) -> None:
    for name in ("step_00000001", "step_00000002", "step_00000003"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert left_behind(tmp_path) == []
    (tmp_path / "checkpoints" / "step_00000000").mkdir()
    (tmp_path / "checkpoints" / ".tmp-step_00000004").mkdir()
    assert left_behind(tmp_path) == [".tmp-step_00000004", "step_00000000"]
