"""Going on after what goes wrong: a restart by the launcher, a damaged checkpoint, a second process beside a living
one.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.end_to_end import running
from tests.end_to_end.running import ENVIRONMENT
from tests.end_to_end.world import STEPS, World

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")


class Bomb:
    """Leaves a folder behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_launchers_restart_goes_on_and_replaces_nothing(
    pretrained: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, flags = pretrained.beside(tmp_path), (*pretrained.train_flags, "--run_name=cut", "--keep_latest_n_ckp=3")
    launch = tmp_path / "torchelastic_x" / "none_y"
    launch.mkdir(parents=True)
    monkeypatch.setitem(running.ENVIRONMENT, "TORCHELASTIC_ERROR_FILE", str(launch / "attempt_0" / "0" / "error.json"))
    place.stop_at(13, signal.SIGKILL, "train", *flags)
    names = {path.name for path in (place.runs / "cut" / "checkpoints").iterdir()}
    assert {"step_00000010", "step_00000012"} <= names and f"step_{STEPS:08}" not in names
    (place.runs / "cut" / "checkpoints" / ".tmp-step_00000015").mkdir()
    monkeypatch.setitem(running.ENVIRONMENT, "TORCHELASTIC_ERROR_FILE", str(launch / "attempt_1" / "0" / "error.json"))
    monkeypatch.setitem(running.ENVIRONMENT, "TORCHELASTIC_RESTART_COUNT", "1")
    done = place.do("train", *flags, "--overwrite=True")
    assert f"continuing from step {12}" not in done.stdout, "nothing was damaged"
    assert place.losses("cut") == pretrained.place.losses("whole")
    assert not [path for path in place.runs.rglob(".tmp-*")] and not (place.runs / "cut" / "owner.json").exists()


def test_a_damaged_checkpoint_is_told_and_the_one_before_goes_on(pretrained: World, tmp_path: Path) -> None:
    place = pretrained.beside(tmp_path)
    for part in ("runs", "logs"):
        shutil.copytree(pretrained.place.folder / part / "whole", tmp_path / part / "cut", symlinks=True)
    newest = max((place.runs / "cut" / "checkpoints").glob("step_*"))
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    for pickled in ("state/.metadata", "pytorch_model.bin"):
        for checkpoint in (place.runs / "cut" / "checkpoints").glob("step_*"):
            (checkpoint / pickled).parent.mkdir(exist_ok=True)
            (checkpoint / pickled).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert place.run("check", f"--model={place.runs / 'cut'}").returncode == 2
    done = place.do("train", "--is_keep_training=True", "--run_name=cut")
    told = " ".join(done.stdout.split())
    assert "model.safetensors is damaged" in told and "continuing from step 20" in told
    assert place.losses("cut") == pretrained.place.losses("whole")
    assert place.do("check", f"--model={place.runs / 'cut'}")
    assert not (tmp_path / "ran").exists(), "nothing in a run's folder is run"


def test_a_second_process_beside_a_living_one_is_refused(pretrained: World, tmp_path: Path) -> None:
    place, flags = pretrained.beside(tmp_path), (*pretrained.train_flags, "--run_name=live", "--log_steps=1")
    pipe = tmp_path / "screen.fifo"
    os.mkfifo(pipe)
    script, *words = place.command("train", *flags)
    first = warm.start(Path(script), words, pipe, pipe, ENVIRONMENT, tmp_path)
    assert first.pid is not None
    with pipe.open(encoding="utf8") as screen:
        for line in screen:
            if line.split("/")[0].split() == ["step", "3"]:
                os.kill(first.pid, signal.SIGSTOP)
                for second in (("--is_keep_training=True",), (*flags, "--overwrite=True")):
                    refused = place.run("train", "--run_name=live", *second)
                    assert refused.returncode == 2, refused.stdout
                    assert f"is in use: process {first.pid} on " in refused.stderr
                os.kill(first.pid, signal.SIGCONT)
    first.join()
    assert first.exitcode == 0
    assert place.losses("live") == pretrained.place.losses("whole")
