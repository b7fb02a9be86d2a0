"""A training run is started, watched and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts.watched import WatchedRun, peak_of_process, train
from units import MIB

TINY = {
    "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1, "max_seq_len": 32,
    "max_steps": 3, "effective_batch_size": 4, "sample_rows": 0, "eval_rows": 2,
}  # fmt: skip


def test_the_first_step_only_warms_up() -> None:
    steps = [{"event": "step", "tokens": 100, "seconds": seconds} for seconds in (50.0, 1.0, 3.0)]
    run = WatchedRun(0, "", 0, [{"event": "plan", "peak_bytes": 7}, *steps, {"event": "plan", "peak_bytes": 5}])
    assert run.tokens_per_second == 50.0 and run.plan["peak_bytes"] == 7
    nothing = WatchedRun(2, "wrong", 0, [])
    assert (nothing.tokens_per_second, nothing.plan, nothing.steps) == (0.0, {}, [])


def test_a_run_that_is_refused_tells_why() -> None:
    run = train({"max_steps": -1})
    assert run.returncode == 2 and "--max_steps = -1" in run.messages and not run.events


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run(processes: int, tmp_path: Path) -> None:
    rows = "".join(f'{{"prompt": "question {n}", "response": "answer {n}"}}\n' for n in range(40))
    (tmp_path / "pairs.jsonl").write_text(rows)
    run = train({"train_file": tmp_path / "pairs.jsonl", **TINY}, processes)
    assert run.returncode == 0, run.messages
    assert len(run.steps) == 3 and run.tokens_per_second > 0
    assert run.peak_bytes == pytest.approx(run.plan["peak_bytes"], rel=0.2)


def test_a_process_that_is_gone_holds_nothing() -> None:
    assert peak_of_process(2**22 + 1) == 0


def test_this_process_holds_something() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("this system has no /proc to read memory from")
    import os

    assert peak_of_process(os.getpid()) > 20 * MIB
