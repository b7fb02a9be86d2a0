"""Commands to kill, and the parts of each in which they are killed."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.faults.disk_faults import Fault
from benchmarks.faults.kill_cases import RUN, WORK, Case, Words, World

STEP, SAVE = "trainer_low_mem:LowMemTrainer._step", "trainer_low_mem:save"
CHECKPOINTS = "training.checkpoints.folder:Checkpoints"
TRAIN_TIMED = {
    STEP: "step",
    SAVE: "save",
    "trainer_low_mem:evaluate": "evaluation",
    f"{CHECKPOINTS}._remove_outdated": "rotation",
    "trainer_low_mem:publish": "publishing",
    "memory.cleanup:clean_all": "cleanup",
}
DPO_TIMED = {STEP: "DPO", "trainer_low_mem:attach_reference": "DPO reference"}


class Commands:
    """The words of each, and what lies in its folder before."""

    def __init__(self, world: World) -> None:
        self.world, self.text = world, f"--train_file={world.folder / 'text.txt'}"
        self.base = world.folder / "base" / "runs" / RUN

    def train(self, folder: Path, *more: str) -> Words:
        """From the beginning, or on."""
        return self.world.train(folder, "--dropout_rate=0.1", *more)

    def cut(self, folder: Path) -> None:
        """Put a run there that was killed in its fifth step."""
        source = self.world.folder / "cut"
        if not source.is_dir():
            self.world.run("cut", *self.train(source), fault=Fault("kill", function=STEP, call=4))
        shutil.copytree(source, folder, symlinks=True)

    def tokenizer(self, folder: Path) -> Words:
        """Train one."""
        return (
            "tokenizer",
            self.text,
            f"--tokenizer_dir={folder / 'tokenizer'}",
            "--vocab_size=400",
            f"--cache_dir={folder / 'cache'}",
            "--overwrite=True",
        )

    def prepare(self, folder: Path) -> Words:
        """Shards, and a search for duplicates."""
        return (
            "prepare",
            self.text,
            f"--tokenizer_dir={self.base}",
            f"--shards_dir={folder / 'shards'}",
            f"--cache_dir={folder / 'cache'}",
            "--num_threads=1",
            "--prepare_workers=0",
            "--dedup=exact",
        )

    def dpo(self, folder: Path) -> Words:
        """Preferences, with a cache of its own, since the reference lies there."""
        places = [word for word in self.world.places(folder) if not word.startswith("--cache_dir")]
        return (
            "dpo",
            f"--train_file={self.world.folder / 'preferences.jsonl'}",
            *WORK,
            *places,
            f"--cache_dir={folder / 'cache'}",
            f"--finetune_from={self.base}",
            "--learning_rate=1e-2",
        )

    def prepared(self, folder: Path) -> None:
        """Put the answers there as shards, without what the reference says of them."""
        source = self.world.folder / "answers"
        if not source.is_dir():
            self.world.run("answers", *self.dpo(source))
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("runs", "logs", "reference-*"))


def cases_of(world: World) -> list[Case]:
    """All commands that are killed."""
    one = Commands(world)
    return [
        Case("train", world, one.train, TRAIN_TIMED),
        Case(
            "resume",
            world,
            one.train,
            {"training.setup.stages:load_data": "resume"},
            one.cut,
            until="symlink step_00000006",
        ),
        Case("prepare", world, one.prepare, {"data.prepare.writing:Writing.run": "prepare"}),
        Case("tokenizer", world, one.tokenizer, {"commands.tokenizer:train_data_tokenizer": "tokenizer"}),
        Case("dpo", world, one.dpo, DPO_TIMED, one.prepared, until="step_0"),
    ]
