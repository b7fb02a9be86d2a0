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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from childproc import start
from data.sources.dates import HELD_OUT_YEARS, SampleDates, build_sample_dates
from data.sources.prompts import Prompt
from language import say
from run_files import METRICS_FILE, EventReader
from settings.declared import Config
from settings.loading import load
from settings.program import FILE, IS_INSTALLED, PACKAGE, program, python, start_command
from training.checkpoints.runs import new_run_name
from training.report.progress import Progress
from training.report.wording import duration
from units import format_size

if TYPE_CHECKING:  # it loads torch, which would lie in memory beside the trainings
    from training.loaded_model import LoadedModel

QUESTIONS = {
    "the 3rd of March, 2021": "2021-03-03", "Sat, Nov 21st 2026": "2026-11-21", "Febuary the twelfth, 1987": "1987-02-12",
    "二〇三五年十月一日": "2035-10-01", "星期日，1999年12月26日": "1999-12-26",
}  # fmt: skip
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
ANSWER_TOKENS = 16  # an ISO date has 10 letters


def demo(config: Config) -> None:
    """Train twice and show what was learnt.

    Raises:
        UserError: a folder cannot be written. DoesNotFit: by the commands that it runs.
    """
    began, screen = time.monotonic(), Progress(1)
    dates = build_sample_dates(config.data.cache_dir)
    first, second = (Path(config.run.output_dir) / new_run_name(kind) for kind in ("pretrain", "finetune"))
    _run(config, say("1 of 3: pretrain on the standard library's prose"), preset="demo_prose", run_name=first.name)
    _run(
        config, say("2 of 3: finetune on written dates"), preset="demo_dates", run_name=second.name, finetune_from=first,
        train_file=dates.train, validation_file=dates.valid,
    )  # fmt: skip
    screen.note("")
    screen.note(say("3 of 3: dates it has never seen"))
    trained, settings = _load(config, second)
    screen.table(say("accuracy on held-out data"), list(_scores(trained, settings, dates)))
    answers = _answers(trained, settings, list(QUESTIONS))
    questions = [
        (text, answer, say("correct") if answer == iso else say("wrong, should be {iso}", iso=iso))
        for (text, iso), answer in zip(QUESTIONS.items(), answers, strict=True)
    ]
    screen.table(say("five sample questions"), questions)
    runs = {say("pretraining"): first, say("finetuning"): second}
    screen.table(say("peak memory"), [_memory(name, Path(config.run.log_dir) / run.name) for name, run in runs.items()])
    command = f"{program()} generate {shlex.quote(f'--model={second}')}" + f' --input="{next(iter(QUESTIONS))}"'
    screen.lines(say("done in {time}; try it", time=duration(time.monotonic() - began)), [command])


def _run(config: Config, title: str, **flags: object) -> None:
    """Show a training command and run it; where it does not come to its end, neither does this one."""
    flags |= {name: config.as_dict()[name] for name in PASSED_ON if config.given(name)}
    words = ["train", *(f"--{name}={value}" for name, value in flags.items())]
    shown = PACKAGE if IS_INSTALLED else f"{python()} {FILE}"
    Progress(1).note("")
    Progress(1).lines(title, [f"$ {shown} {shlex.join(words)}"])
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


def _load(config: Config, folder: Path) -> tuple[LoadedModel, Config]:
    from training.loaded_model import load_model
    from training.saved_model import find_model

    given = {
        name: config.as_dict()[name]
        for name in ("memory_budget", "device", "num_threads", "compiled_kernels")
        if config.given(name)
    }
    settings = load("generate", {**given, "model": str(folder), "max_new_tokens": ANSWER_TOKENS, "max_seq_len": 64})
    return load_model(settings, find_model(settings)), settings


def _answers(trained: LoadedModel, settings: Config, texts: list[str]) -> list[str]:
    from commands.generate import Encoder

    encoder = Encoder(trained, settings.data.max_seq_len, splits=False)
    inputs = [encoder.encode(Prompt("demo", text, {})) for text in texts]
    return [trained.tokenizer.decode_answer(ids) for ids in trained.writer(settings).answers(inputs)]


def _scores(trained: LoadedModel, settings: Config, dates: SampleDates) -> Iterator[tuple[str, ...]]:
    parts = {
        say("years not in training ({count} of 200)", count=len(HELD_OUT_YEARS)): dates.years,
        say("a format not in training: {form}", form="March the 3rd, 2021"): dates.english,
        say("a format not in training: {form}", form="二〇二一年3月3日"): dates.chinese,
    }
    for name, path in parts.items():
        rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
        answers = _answers(trained, settings, [row["prompt"] for row in rows])
        right = sum(row["response"] == answer for row, answer in zip(rows, answers, strict=True))
        yield name, say("{part} of {whole}", part=f"{right:,}", whole=f"{len(rows):,}"), f"{right / len(rows):.1%}"


def _memory(name: str, log: Path) -> tuple[str, str]:
    """What the plan of a run said, and what was measured."""
    (end,) = [event for event in EventReader(log / METRICS_FILE).events() if event["event"] == "end"]
    planned = format_size(end["planned_peak_bytes"])
    measured = format_size(end["measured_peak_bytes"])
    return name, say("planned {planned}, measured {measured}", planned=planned, measured=measured)
