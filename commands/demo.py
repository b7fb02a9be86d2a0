"""`demo`: pretrain on prose, finetune on dates, score, answer.

Every part is a command that could be typed, shown before it runs in a process of its own: the second continues with the
model that the first has written. The answers are scored here, on rows whose years or written forms no training row has;
an answer is right when it is the date, letter by letter.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.sources.dates import HELD_OUT_YEARS, SampleDates, build_sample_dates
from settings.declared import Config
from settings.loading import load
from settings.program import FILE, IS_INSTALLED, PACKAGE, program, python, start_command
from support.child_process import start
from support.language import say
from support.units import format_size
from training.checkpoints.runs import new_run_name
from training.report.progress import Progress
from training.report.run_files import METRICS_FILE, EventReader
from training.report.wording import duration

QUESTIONS = {
    "the 3rd of March, 2021": "2021-03-03",
    "Sat, Nov 21st 2026": "2026-11-21",
    "Febuary the twelfth, 1987": "1987-02-12",
    "二〇三五年十月一日": "2035-10-01",
    "星期日，1999年12月26日": "1999-12-26",
}
PASSED_ON = (
    "cache_dir",
    "output_dir",
    "log_dir",
    "memory_budget",
    "device",
    "num_threads",
    "compiled_kernels",
    "seed",
    "language",
)
PASSED_TO_GENERATE = ("memory_budget", "device", "num_threads", "compiled_kernels")
ANSWER_TOKENS = 16  # an ISO date has 10 letters
Answer = Callable[[Sequence[str]], list[str]]


def demo(config: Config) -> None:
    """Train twice and show what was learnt.

    Raises:
        UserError: a folder cannot be written. DoesNotFit: by the commands that it runs.
    """
    began = time.monotonic()
    screen = Progress(1)
    passed_on = {name: value for name, value in config.as_dict().items() if name in PASSED_ON and config.is_set(name)}
    dates = build_sample_dates(config.data.cache_dir)
    first = Path(config.run.output_dir) / new_run_name("pretrain")
    second = Path(config.run.output_dir) / new_run_name("finetune")
    _run(
        say("1 of 3: pretrain on the standard library's prose"),
        {"preset": "demo_prose", "run_name": first.name, **passed_on},
    )
    files = {"train_file": dates.train, "validation_file": dates.valid}
    _run(
        say("2 of 3: finetune on written dates"),
        {"preset": "demo_dates", "run_name": second.name, "finetune_from": first, **files, **passed_on},
    )
    screen.note("")
    screen.note(say("3 of 3: dates it has never seen"))
    answer = answering(second, {name: value for name, value in passed_on.items() if name in PASSED_TO_GENERATE})
    screen.table(say("accuracy on held-out data"), list(scores(answer, dates)))
    questions = [
        (text, answered, say("correct") if answered == iso else say("wrong, should be {iso}", iso=iso))
        for (text, iso), answered in zip(QUESTIONS.items(), answer(list(QUESTIONS)), strict=True)
    ]
    screen.table(say("five sample questions"), questions)
    runs = {say("pretraining"): first, say("finetuning"): second}
    screen.table(say("peak memory"), [_memory(name, Path(config.run.log_dir) / run.name) for name, run in runs.items()])
    model = shlex.quote(f"--model={second}")
    commands = [
        f'{program()} generate {model} --input="{next(iter(QUESTIONS))}"',
        f"{program()} export {model} --format=web --quantize=int8 --output=page",
    ]
    screen.lines(say("done in {time}; try it", time=duration(time.monotonic() - began)), commands)


def _run(title: str, flags: Mapping[str, object]) -> None:
    """Show a training command and run it; where it does not come to its end, neither does this one."""
    words = ["train", *(f"--{name}={value}" for name, value in flags.items())]
    prefix = PACKAGE if IS_INSTALLED else f"{python()} {FILE}"
    Progress(1).note("")
    Progress(1).lines(title, [f"$ {prefix} {shlex.join(words)}"])
    code = ended([*start_command(), *words])
    if code:
        raise SystemExit(code)


def ended(words: list[str]) -> int:
    """Run a command and give its exit code. An interrupt is for it to answer: it saves, and says how to continue."""
    with start(words) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                if os.name == "posix":
                    child.terminate()  # Ctrl-C has reached it as well, a signal to this process alone has not


def answering(folder: Path, flags: Mapping[str, Any]) -> Answer:
    """What answers texts by the model in a folder.

    Args:
        flags: of `generate`.
    """
    from commands.generate import ANSWER, answer_work  # They load torch, which would lie in memory beside trainings.

    flags = {**flags, "model": str(folder), "max_new_tokens": ANSWER_TOKENS, "max_seq_len": 64}
    work = answer_work(load("generate", flags))
    work.load()
    return lambda texts: [answer.columns[ANSWER] for answer in work.texts(texts)]


def scores(answer: Answer, dates: SampleDates) -> Iterator[tuple[str, ...]]:
    """Name, count and share of the dates that are answered letter by letter, of each part of the held-out rows."""
    parts = {
        say("years not in training ({count} of 200)", count=len(HELD_OUT_YEARS)): dates.years,
        say("a format not in training: {form}", form="March the 3rd, 2021"): dates.english,
        say("a format not in training: {form}", form="二〇二一年3月3日"): dates.chinese,
    }
    for name, path in parts.items():
        rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
        answers = answer([row["prompt"] for row in rows])
        right = sum(row["response"] == answer for row, answer in zip(rows, answers, strict=True))
        yield name, say("{part} of {whole}", part=f"{right:,}", whole=f"{len(rows):,}"), f"{right / len(rows):.1%}"


def _memory(name: str, log: Path) -> tuple[str, str]:
    """What the plan of a run said, and what was measured."""
    (end,) = [event for event in EventReader(log / METRICS_FILE).events() if event["event"] == "end"]
    planned = format_size(end["planned_peak_bytes"])
    measured = format_size(end["measured_peak_bytes"])
    return name, say("planned {planned}, measured {measured}", planned=planned, measured=measured)
