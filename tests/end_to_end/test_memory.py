"""Memory over a whole run: it stays flat, and a limit that is lowered while it runs is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.end_to_end.running import ENVIRONMENT, Place, Run
from tests.end_to_end.world import SHAPE, World

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
MARGIN = 32 * 2**20  # what the budget leaves free below a limit of this size


class Group:
    """A control group with a memory limit, of version 1 or 2."""

    def __init__(self, folder: Path, limit_file: str) -> None:
        self.folder, self.limit_file = folder, folder / limit_file

    def limit(self, size_bytes: int) -> None:
        self.limit_file.write_text(str(size_bytes))

    def enter(self) -> None:
        """Put this process into the group; for a child, before it becomes another program."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def group() -> Iterator[Group]:
    made = None
    for root, limit_file in ((V1, "memory.limit_in_bytes"), (V2, "memory.max")):
        folder = root / f"frugal_test_{os.getpid()}"
        try:
            folder.mkdir()
            made = Group(folder, limit_file)
            made.limit(8 * 2**30)
            break
        except OSError:
            if folder.is_dir():
                folder.rmdir()
            made = None
    if made is None:
        pytest.skip("no control group can be made here")
    yield made
    made.folder.rmdir()


@pytest.mark.slow
def test_memory_is_flat_over_two_thousand_steps_of_varying_length(world: World) -> None:
    place = world.place
    place.do(
        "train",
        f"--train_file={world.pairs}",
        *SHAPE,
        "--max_steps=2000",
        "--max_seq_len=64",
        "--effective_batch_size=4",
        "--save_steps=1000",
        "--eval_steps=500",
        "--run_name=flat",
        "--mixed_precision=no",
        "--sample_rows=0",
    )
    held = {
        e["step"]: e["anon_bytes"] for e in place.events("flat") if e["event"] == "memory" and e["phase"] == "train"
    }
    assert max(size for step, size in held.items() if step > 200) <= 1.01 * held[200]


@pytest.mark.slow
def test_a_limit_that_is_lowered_while_it_runs_is_survived(world: World, group: Group) -> None:
    flags = (
        f"--train_file={world.pairs}",
        "--vocab_size=512",
        "--d_model=256",
        "--d_ff=1024",
        "--num_layers=6",
        "--num_decoder_layers=6",
        "--num_heads=4",
        "--max_seq_len=128",
        "--max_steps=40",
        "--save_steps=10",
        "--eval_steps=20",
        "--effective_batch_size=24",
        "--mixed_precision=no",
        "--sample_rows=0",
        "--log_steps=1",
    )
    place = world.place
    place.do("train", *flags, "--run_name=undisturbed")
    lines = []
    limit = 0
    with subprocess.Popen(
        [sys.executable, *place.command("train", *flags, "--run_name=lowered")],
        cwd=place.folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=group.enter,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step  8/"):
                peak = [event["peak_bytes"] for event in place.events("lowered") if event["event"] == "step"][-1]
                # The run as it is still lives under this limit, though not with the margin that a limit asks for.
                limit = peak + MARGIN // 2
                group.limit(limit)
    assert process.returncode == 0, "".join(lines)
    events = place.events("lowered")
    records = [event for event in events if event["event"] == "recovery"]
    assert records and {event["reason"] for event in records} <= {"budget", "pressure"}
    first, *_, last = (event for event in events if event["event"] == "plan")
    assert last["peak_bytes"] < min(first["peak_bytes"], limit) and last["budget_bytes"] < limit - MARGIN
    held = [
        event["memory_bytes"] for event in events if event["event"] == "step" and event["step"] > records[-1]["step"]
    ]
    assert max(held) <= limit
    ours, theirs = place.losses("lowered"), place.losses("undisturbed")
    assert ours == pytest.approx(theirs, rel=1e-4)


CHILD = Path(__file__).parent / "children" / "over_budget_child.py"
LEAST = (
    *SHAPE,
    "--max_seq_len=64",
    "--max_steps=4",
    "--save_steps=4",
    "--eval_steps=4",
    "--effective_batch_size=1",
    "--mixed_precision=no",
    "--sample_rows=0",
    "--memory_mode=ultra",
    "--memory_budget=600M",
)


def over_budget(world: World, place: Place) -> Run:
    """A run whose second step takes 700 MiB that no plan knows, for a moment."""
    words = place.command("train", f"--train_file={world.text}", *LEAST, "--run_name=passing")[1:]
    return warm.run(CHILD, ["2", "700", *words], ENVIRONMENT, place.folder)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="passing peaks are known where the kernel tells them"
)
def test_a_run_that_was_over_its_budget_says_so_last_saves_and_ends_with_3(world: World, tmp_path: Path) -> None:
    place = world.beside(tmp_path)
    done = over_budget(world, place)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "step 2: the peak of" in done.stdout and "the run continues, saves, and ends with exit code 3" in done.stdout
    last = done.stderr.strip().splitlines()[-2:]
    assert last[0] == "train: done, but over the memory budget"
    assert last[1].startswith("  --memory_budget = 600.0 MiB, was exceeded, first at step 2: the peak was ")
    assert f"everything is saved in {place.runs / 'passing'}" in last[1]
    assert list(place.losses("passing")) == [1, 2, 3, 4]
    assert (place.runs / "passing" / "checkpoints" / "step_00000004" / "state").is_dir()
    enough = int(last[1].partition("--memory_budget=")[2].partition("M,")[0])
    assert 2**20 * enough >= place.events("passing")[-1]["measured_peak_bytes"] > 2**20 * (enough - 1)
