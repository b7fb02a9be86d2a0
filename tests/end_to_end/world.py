"""Six tiny models, each trained once a session by the first worker that needs it, and shared by all.

They compute in fp32, on one thread, with the instructions that every supported processor has, so that their losses can
be compared with recorded ones.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tests.end_to_end import running
from tests.end_to_end.running import Place

STEPS = 24
SHAPE = (
    "--d_model=32",
    "--d_kv=16",
    "--d_ff=64",
    "--num_heads=2",
    "--num_layers=1",
    "--num_decoder_layers=2",
    "--vocab_size=512",
)
# Dropout is on and the batch is odd: neither may make a difference to any of the comparisons.
COMMON = (
    "--max_seq_len=64",
    "--effective_batch_size=7",
    "--dropout_rate=0.1",
    "--mixed_precision=no",
    "--seed=5",
    "--eval_rows=16",
)
WORK = (*COMMON, f"--max_steps={STEPS}", "--save_steps=5", "--eval_steps=12", "--sample_rows=1")
FINETUNING = (*COMMON, "--finetune_from={whole}", "--eval_steps=12", "--sample_rows=1")
# Sums in another order differ by 1e-7. Where that puts one unit of one token on the other side of ReLU's kink, its
# gradient is another, which made 1.5e-5 in 24 steps (a processor with AVX2); 1e-4 more of dropout already makes 2e-3.
SAME = 1e-4
# run -> command and flags; {text.txt} and the like are data files of the world, {whole} is a run of it
RUNS = {
    "whole": ("train", "--train_file={text.txt}", *SHAPE, *WORK),
    "prefix": ("train", "--train_file={text.txt}", "--objective=prefix", *SHAPE, *WORK),
    "pairs": (
        "train",
        "--is_finetune=True",
        "--train_file={pairs.jsonl}",
        "--validation_file={pairs.jsonl}",
        *FINETUNING,
        "--max_steps=120",
        "--eval_steps=60",
        "--learning_rate=0.03",
        "--dropout_rate=0",
    ),
    "preferences": (
        "dpo",
        "--train_file={preferences.jsonl}",
        *FINETUNING,
        f"--max_steps={STEPS}",
        "--save_steps=5",
        "--learning_rate=1e-2",
        "--beta=0.5",
        "--dropout_rate=0",
    ),
    "labels": (
        "train",
        "--train_file={labels.jsonl}",
        "--validation_file={labels.jsonl}",
        "--head=sequence",
        *FINETUNING,
        "--max_steps=40",
        "--learning_rate=0.01",
    ),
    "lora": (
        "train",
        "--is_finetune=True",
        "--train_file={new_words.jsonl}",
        *FINETUNING,
        f"--max_steps={STEPS}",
        "--lora_rank=4",
        "--lora_targets=all",
        "--lora_dropout=0.1",
        "--learning_rate=0.03",
        "--save_steps=5",
    ),
}

NAMES = re.compile(r"\{(" + "|".join(RUNS) + r"|\w+\.\w+)\}")


@dataclass(frozen=True)
class World:
    """The data files, and the folders in which the six runs are made."""

    place: Place

    @property
    def text(self) -> Path:
        return self.place.folder / "text.txt"

    @property
    def pairs(self) -> Path:
        return self.place.folder / "pairs.jsonl"

    @property
    def train_flags(self) -> tuple[str, ...]:
        """Flags of the run `whole`."""
        return self.flags("whole")

    @classmethod
    def open(cls, folder: Path) -> World:
        """The world of a folder that all workers share; its data files are written by the first."""
        world = cls(Place(folder, folder / "cache"))
        with FileLock(folder / ".data.lock"):
            if not (folder / "labels.jsonl").exists():
                running.write_text(world.text)
                running.write_pairs(world.pairs)
                running.write_preferences(folder / "preferences.jsonl")
                running.write_talks(folder / "talks.jsonl")
                running.write_new_words(folder / "new_words.jsonl")
                running.write_labels(folder / "labels.jsonl")
        return world

    def path(self, name: str) -> Path:
        """A data file (`text.txt`), or the folder of a run (`whole`), which is trained unless it is there."""
        if name not in RUNS:
            return self.place.folder / name
        folder, screen = self.place.runs / name, self.screen_of(name)
        with FileLock(self.place.folder / f".{name}.lock"):
            if not screen.exists():
                command = RUNS[name][0]
                done = self.place.do(command, *self.flags(name), f"--run_name={name}")
                screen.write_text(done.stdout, encoding="utf8")
        return folder

    def screen_of(self, name: str) -> Path:
        """What a run has printed."""
        return self.place.folder / f"{name}.screen"

    def flags(self, name: str) -> tuple[str, ...]:
        """Flags of one of the six runs, its name aside."""
        return tuple(self.fill(flag) for flag in RUNS[name][1:])

    def fill(self, word: str) -> str:
        """A word of a command line with the paths of the data files and runs that it names in braces."""
        return re.sub(NAMES, lambda found: str(self.path(found[1])), word)

    def beside(self, folder: Path) -> Place:
        """Empty folders of another test, with the same cache."""
        return Place(folder, self.place.cache)

    def difference(self, place: Place, name: str, undisturbed: str = "whole") -> float:
        """Largest relative difference of a run's losses to those of a run of the world."""
        self.path(undisturbed)
        ours, theirs = place.losses(name), self.place.losses(undisturbed)
        assert ours.keys() == theirs.keys()
        return max(abs(ours[step] / theirs[step] - 1) for step in ours)


def prompts_of(path: Path) -> list[str]:
    """The prompts of a file of pairs."""
    return [json.loads(line)["prompt"] for line in path.read_text("utf8").splitlines()]
