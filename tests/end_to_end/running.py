"""The program run as users do: real processes, real files, the exit code."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).resolve().parent.parent.parent
# Models this small only wait for each other with two threads, above all on a busy machine; what they compute is
# compared with recorded figures, so it is computed alike on every processor.
ENVIRONMENT = {
    **os.environ,
    "PYTHONWARNINGS": "ignore",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
Run = subprocess.CompletedProcess[str]
ENGLISH = "the river runs under a stone bridge where small boats wait for morning light and people talk of rain"
WORDS = ENGLISH.split()
LETTERS = "春天的河水从石桥下流过小船在晨光里等待安静人们谈论着雨和收成"


@dataclass(frozen=True)
class Place:
    """Folders of one test: runs, logs and caches apart from everybody else's."""

    folder: Path
    cache: Path

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def flags(self) -> list[str]:
        return [f"--output_dir={self.runs}", f"--log_dir={self.logs}", f"--cache_dir={self.cache}"]

    def command(self, name: str, *flags: str) -> list[str]:
        own = [
            flag
            for flag in self.flags()
            if not (name in ("generate", "convert", "merge", "check", "embed") and flag.startswith("--cache_dir"))
        ]
        return [str(ROOT / "train_low_mem.py"), name, *own, *flags]

    def run(self, name: str, *flags: str, launcher: tuple[str, ...] = (sys.executable,)) -> Run:
        """Run a command to its end, in a child with torch imported unless a launcher starts it."""
        command = self.command(name, *flags)
        if launcher == (sys.executable,) and "PYTHONPATH" not in ENVIRONMENT:  # which may bring faults
            return warm.run(Path(command[0]), command[1:], ENVIRONMENT, self.folder)
        return subprocess.run([*launcher, *command], cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True)

    def do(self, name: str, *flags: str, launcher: tuple[str, ...] = (sys.executable,)) -> Run:
        """Run a command that has to succeed."""
        done = self.run(name, *flags, launcher=launcher)
        assert done.returncode == 0, f"{name} {flags}\n{done.stdout}\n{done.stderr}"
        return done

    def stop_at(self, step: int, signal_number: int, name: str, *flags: str) -> Run:
        """Start a command, send a signal when it tells of a step (with --log_steps=1), and wait for its end."""
        command = self.command(name, "--log_steps=1", *flags)
        pipe = self.folder / "screen.fifo"
        lines = []
        os.mkfifo(pipe)
        child = warm.start(Path(command[0]), command[1:], pipe, pipe, ENVIRONMENT, self.folder)
        with pipe.open(encoding="utf8") as screen:
            for line in screen:
                lines.append(line)
                if line.split("/")[0].split() == ["step", str(step)]:
                    assert child.pid is not None
                    os.kill(child.pid, signal_number)
        child.join()
        pipe.unlink()
        assert child.exitcode is not None
        return Run(command, child.exitcode, "".join(lines), "")

    def events(self, run_name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.logs / run_name / "metrics.jsonl").read_text("utf8").splitlines()]

    def losses(self, run_name: str) -> dict[int, float]:
        """Step -> loss; each step may stand once."""
        steps = [event for event in self.events(run_name) if event["event"] == "step"]
        losses = {event["step"]: event["loss"] for event in steps}
        assert len(losses) == len(steps), "a step stands twice"
        return losses


def write_text(path: Path, lines: int = 400) -> Path:
    """English and Chinese lines of many lengths."""
    draw = random.Random(7)
    with path.open("w", encoding="utf8") as file:
        for number in range(lines):
            english = " ".join(draw.choices(WORDS, k=draw.randint(5, 40)))
            chinese = "".join(draw.choices(LETTERS, k=draw.randint(5, 60)))
            file.write((chinese if number % 2 else english) + "\n")
    return path


def write_pairs(path: Path, rows: int = 120) -> Path:
    """Questions in two languages, each with one answer, which can be learnt by heart."""
    draw = random.Random(8)
    with path.open("w", encoding="utf8") as file:
        for _ in range(rows):
            number = draw.randrange(len(WORDS))
            word, other = WORDS[number], WORDS[-number]
            row = {"prompt": f"{word} 是什么？", "response": f"{word} is {other}, {LETTERS[number]}"}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def write_preferences(path: Path, rows: int = 150) -> Path:
    """The better answer says yes, the worse one no."""
    with path.open("w", encoding="utf8") as file:
        for number in range(rows):
            word = WORDS[number % len(WORDS)]
            row = {"prompt": f"is {word} {number}?", "chosen": f"yes, {word}", "rejected": f"no, not {word} at all"}
            file.write(json.dumps(row) + "\n")
    return path


def write_labels(path: Path, rows: int = 150) -> Path:
    """Texts of two languages, labelled by their language."""
    draw = random.Random(9)
    with path.open("w", encoding="utf8") as file:
        for number in range(rows):
            english = " ".join(draw.choices(WORDS, k=draw.randint(3, 9)))
            chinese = "".join(draw.choices(LETTERS, k=draw.randint(3, 15)))
            row = {"text": chinese, "label": "zh"} if number % 2 else {"text": english, "label": "en"}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def write_talks(path: Path, rows: int = 40) -> Path:
    """Conversations of two turns."""
    with path.open("w", encoding="utf8") as file:
        for n in range(rows):
            turns = (f"word {n}?", f"it is {n}", "and then?", f"then {n + 1}")
            roles = ("user", "assistant") * 2
            messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_new_words(path: Path, rows: int = 40) -> Path:
    """Pairs whose answers are tokens that no tokenizer has; these tokens stand beside, in a file of their own."""
    path.with_suffix(".txt").write_text("<a_1>\n<a_2>\n", encoding="utf8")
    with path.open("w", encoding="utf8") as file:
        for n in range(rows):
            file.write(json.dumps({"prompt": f"the river {n}", "response": f"<a_{n % 2 + 1}>"}) + "\n")
    return path
