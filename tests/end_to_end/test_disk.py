"""A disk that is full, over its quota, read-only, broken or no longer there: told, nothing lost, and on with room
again.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.disk_faults import VARIABLE, Fault
from tests import warm
from tests.end_to_end import running
from tests.end_to_end.running import ENVIRONMENT, Place
from tests.end_to_end.world import World
from training.checkpoints.folder import Checkpoints

pytestmark = pytest.mark.skipif(os.name == "nt", reason="file systems as POSIX has them")
IN_THE_SECOND_SAVE = 96  # changes of the disk before it
ON_A_FAULTY_DISK = """
import runpy, sys
from benchmarks.faults.disk_faults import start_as_told
start_as_told()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def is_told(done: running.Run, *parts: str) -> None:
    told = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for part in parts:
        assert part in told


def goes_on(world: World, place: Place, *flags: str) -> None:
    """The very same command ends as the run that nothing has disturbed."""
    place.do("train", *flags)
    assert place.losses("r") == world.place.losses("whole")
    for name in ("model.safetensors", "checkpoints/latest/state/optimizer.safetensors"):
        assert (place.runs / "r" / name).read_bytes() == (world.place.runs / "whole" / name).read_bytes()


def test_a_save_that_fails_is_told_and_the_run_goes_on_with_room(pretrained: World, tmp_path: Path) -> None:
    place, flags = pretrained.beside(tmp_path), (*pretrained.train_flags, "--run_name=r", "--is_keep_training=auto")
    fault = {VARIABLE: Fault("error", IN_THE_SECOND_SAVE, error=errno.ENOSPC).text()}
    refused = warm.run(ON_A_FAULTY_DISK, place.command("train", *flags), {**ENVIRONMENT, **fault}, place.folder)
    is_told(refused, f"--output_dir = {place.runs}", os.strerror(errno.ENOSPC), "is whole; ", "--is_keep_training=True")
    assert Checkpoints(place.runs / "r", 1).latest() is not None
    goes_on(pretrained, place, *flags)


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_anything_is_written(
    pretrained: World, small_disk: Path, tmp_path: Path
) -> None:
    place = Place(tmp_path, pretrained.place.cache)
    mount("-o", "remount,size=64k", str(small_disk))
    refused = place.run("train", *pretrained.train_flags, "--run_name=r", f"--output_dir={small_disk / 'runs'}")
    is_told(refused, "has 64.0 KiB free, but one checkpoint takes")
    assert not (small_disk / "runs" / "r").exists()


# --- disks of their own, where one may mount some ---


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own in memory, of 600 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=600k", "none", str(folder))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_no_longer_mounted(pretrained: World, small_disk: Path, tmp_path: Path) -> None:
    kept, seen = tmp_path / "kept", tmp_path / "seen"
    kept.mkdir(), seen.mkdir()
    mount("--bind", str(kept), str(seen))
    place = Place(tmp_path, pretrained.place.cache)
    flags = (*pretrained.train_flags, "--run_name=r", "--is_keep_training=auto", "--log_steps=1")
    with subprocess.Popen(
        [sys.executable, *place.command("train", *flags, f"--output_dir={seen}")],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        for line in run.stdout:
            if line.split("/")[0].split() == ["step", "7"]:
                subprocess.run(["umount", "-l", str(seen)], check=True)
        told = run.stderr.read()
    is_told(running.Run([], run.returncode, "", told), f"{seen / 'r'} is gone")
    assert list(seen.iterdir()) == [], "nothing is written below the place of another disk"
    kept.rename(place.runs)
    goes_on(pretrained, place, *flags)
