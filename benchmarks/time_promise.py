"""Estimated times against measured ones: `python -m benchmarks.time_promise [--cases=N] [--fit=True] [--fresh=True] [--write=True]`.

Real training runs over models, lengths, batches and dtypes. Side by side: the range that the first lines of a run tell and
the time that it took; the step that was predicted and the mean of those that were timed; what was told anew after 20 steps
and what was left then. Each case is noted as it ends, so that an interrupted benchmark continues where it was.

`--fit=True` runs nothing: from the steps noted so far it looks for the constants (`memory.estimate.time.Pace`) of this class of
processor that predict them best, with this machine's measured speeds, and prints them for `memory.estimate.time.PACES`.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contract import WORDS
from benchmarks.parts import children, watched
from benchmarks.parts.results import ROOT, markdown, write_section
from benchmarks.parts.rows import write_rows
from devices.cores import usable_cores
from memory.estimate.shapes import Shapes
from memory.estimate.time import PACES, Pace, predict_seconds
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.machines import this_machine
from memory.step_work import make_work
from settings.declared import Config
from settings.loading import load

CACHE = ROOT / "data" / "cache" / "time_promise"
FIGURES = CACHE / "figures.json"
OPTIONS = {"cases": "1000", "fit": "False", "fresh": "False", "write": "True"}
STEPS, WARM_STEPS = 30, 3
FITTED = (
    "efficiency",
    "half_tokens",
    "block_seconds",
    "update_seconds",
    "value_flops",
    "memory_rate",
)
FACTORS = (0.5, 0.8, 0.9, 0.97, 1.03, 1.1, 1.25, 2.0)  # by which a constant is changed while that helps
FIRST = {
    "block_seconds": 1e-4,
    "update_seconds": 1e-4,
    "value_flops": 100.0,
}  # where the record has none, a factor would find nothing

Case = dict[str, Any]
Flags = dict[str, Any]


def cases() -> list[Flags]:
    """Configurations that differ in what takes time; `letters`: of prompt and response, least and most."""
    rows: list[Flags] = [{"letters": (60, 60)}, {"letters": (10, 120)}, {"letters": (10, 20)}]
    rows += [{"letters": (120, 250), "effective_batch_size": b} for b in (4, 32)]
    rows += [
        {"batch_size_per_gpu": 1},
        {"memory_mode": "ultra"},
        {"mixed_precision": "no"},
        {"mixed_precision": "bf16"},
    ]
    rows += [{"optimizer": "adamw"}, {"optimizer": "adamw_8bit"}, {"max_grad_norm": 1.0}]
    rows += [{"d_model": 512, "d_ff": 2048, "num_layers": 4, "num_decoder_layers": 4, **more} for more in (
        {}, {"letters": (10, 20)}, {"mixed_precision": "no"}, {"mixed_precision": "no", "letters": (10, 20)},
    )]  # fmt: skip
    large = {"model_preset": "t5-small", "max_steps": 24}
    rows += [{**large, **more} for more in (
        {}, {"letters": (200, 250)}, {"memory_mode": "ultra"}, {"mixed_precision": "no"}, {"memory_budget": "900M"},
    )]  # fmt: skip
    rows += [{"model_preset": "t5-base", "max_steps": 22, "effective_batch_size": 4}]
    common = {"model_preset": "tiny", "letters": (60, 120), "effective_batch_size": 8, "max_steps": STEPS}
    return [{**common, **row} for row in rows]


def lengths_of_rows(letters: Sequence[int]) -> list[tuple[int, int]]:
    """Letters of prompt and response of each row, always the same."""
    draw = random.Random(0)
    return [(draw.randint(*letters), draw.randint(*letters)) for _ in range(400)]


def data_file(letters: Sequence[int]) -> Path:
    """Those rows, made once."""
    path = CACHE / "rows_{}_{}.jsonl".format(*letters)
    if not path.is_file():
        text = WORDS * 20
        write_rows(path, [{"prompt": text[:p], "response": text[:r]} for p, r in lengths_of_rows(letters)])
    return path


def run_case(flags: Flags) -> Case:
    """One training run: what it promised, and what it took."""
    own = {name: value for name, value in flags.items() if name != "letters"}
    common = {
        "train_file": data_file(flags["letters"]), "objective": "pairs", "max_seq_len": 256, "eval_steps": 10,
        "save_steps": 20, "num_threads": usable_cores(),
    }  # fmt: skip
    run = watched.train({**common, **own})
    timed = [step["seconds"] for step in run.steps[WARM_STEPS:]]
    if run.returncode or not timed:
        return {"flags": flags, "failed": run.messages.strip()[-300:] or f"exit code {run.returncode}"}
    renewed = next((step for step in run.steps if "seconds_left" in step), None)
    after = sum(step["seconds"] for step in run.steps if renewed and step["step"] > renewed["step"])
    return {
        "flags": flags, "choice": run.plan["choice"], "promised": [run.plan[f"seconds_{end}"] for end in ("low", "total", "high")],
        "took": run.events[-1]["seconds_since_plan"], "step_promised": run.plan["seconds"], "step_took": statistics.mean(timed),
        "left_promised": renewed and renewed["seconds_left"], "left_in_steps": after,
    }  # fmt: skip


def table(done: Sequence[Case]) -> str:
    """Promise and truth side by side."""
    rows = []
    for case in done:
        low, middle, high = case["promised"]
        kept = "yes" if low <= case["took"] <= high else "**no**"
        left = "" if case["left_promised"] is None else f"{case['left_promised']:.1f} / {case['left_in_steps']:.1f}"
        rows.append([
            " ".join(f"{name}={value}" for name, value in case["flags"].items()), f"{middle:.1f} ({low:.1f}-{high:.1f})",
            f"{case['took']:.1f}", kept, f"{case['step_promised']:.3f}", f"{case['step_took']:.3f}", left,
        ])  # fmt: skip
    head = ["configuration", "estimate, s", "actual, s", "kept", "step, estimate", "step, actual"]
    return markdown([*head, "time left after 20 steps: estimate / actual"], rows)


def body_of(notes: Sequence[Case]) -> str:
    """The section of the page."""
    done = [case for case in notes if "failed" not in case]
    off = [case["took"] / case["promised"][1] - 1 for case in done]
    steps = [case["step_took"] / case["step_promised"] - 1 for case in done]
    kept = sum(case["promised"][0] <= case["took"] <= case["promised"][2] for case in done)
    return (
        f"{kept} of {len(done)} runs took a time within the estimated range; relative to its middle, the median is "
        f"{statistics.median(off):+.0%}, from {min(off):+.0%} to {max(off):+.0%}; steps alone: median "
        f"{statistics.median(steps):+.0%}, from {min(steps):+.0%} to {max(steps):+.0%}.\n\n{table(done)}"
    )


def work_of(case: Case, machine: Machine) -> tuple[Workload, ExecutionPlan]:
    """The work of a case, as its run saw it in the mean, and its way to run."""
    own = {name: str(value) for name, value in case["flags"].items() if name != "letters"}
    config: Config = load("train", {"train_file": "any", "objective": "pairs", "tokenizer_type": "byte", **own})
    rows = np.minimum(np.array(lengths_of_rows(case["flags"]["letters"])) + 1, 256)  # a byte a letter, and the end
    batch = int(config.train.effective_batch_size)
    whole = rows[: len(rows) // batch * batch].reshape(-1, batch, 2)
    work = make_work(config, machine, *(int(side) for side in rows.max(0)))
    return replace(work, shapes=Shapes(whole[..., 0], whole[..., 1])), ExecutionPlan(**case["choice"])


def fit(error: Callable[[Pace], float], pace: Pace, rounds: int = 40) -> Pace:
    """Change one constant after the other by a factor, as long as that lowers the error."""
    first: dict[str, Any] = {name: getattr(pace, name) or least for name, least in FIRST.items()}
    pace = replace(pace, **first)
    best = error(pace)
    for _ in range(rounds):
        before = best
        for name in FITTED:
            for factor in FACTORS:
                trial = replace(pace, **{name: getattr(pace, name) * factor})
                found = error(trial)
                if found < best:
                    best, pace = found, trial
        if best > 0.999 * before:
            break
    return pace


def step_error(notes: Sequence[Case], machine: Machine) -> Callable[[Pace], float]:
    """The mean square of the logarithm of predicted over measured steps, as a function of the constants."""
    known = [(*work_of(case, machine), case["step_took"]) for case in notes if "failed" not in case]

    def error(pace: Pace) -> float:
        return statistics.mean(
            math.log(predict_seconds(w, choice, machine, pace) / took) ** 2 for w, choice, took in known
        )

    return error


def print_fit(notes: Sequence[Case]) -> None:
    """The constants that predict best what was measured."""
    machine = this_machine(threads=usable_cores()).as_measured()
    error = step_error(notes, machine)
    before = PACES[machine.speed_class]
    after = fit(error, before)
    print(
        f"{machine.speed_class}: typical error {math.expm1(error(before) ** 0.5):.0%} -> {math.expm1(error(after) ** 0.5):.0%}"
    )
    print(", ".join(f"{name}={getattr(after, name):.3g}" for name in FITTED))


def main(arguments: list[str]) -> None:
    """Run what is not noted yet, and write the page; or fit."""
    _, options = children.options_of(arguments, OPTIONS, str(__doc__))
    CACHE.mkdir(parents=True, exist_ok=True)
    notes = json.loads(FIGURES.read_text(encoding="utf8")) if FIGURES.is_file() and options["fresh"] != "True" else []
    if options["fit"] == "True":
        return print_fit(notes) if notes else sys.exit("nothing is noted yet: run it without --fit first")
    known = {json.dumps(case["flags"], sort_keys=True) for case in notes}
    wanted = [flags for flags in cases() if json.dumps(flags, sort_keys=True) not in known]
    for flags in wanted[: int(options["cases"])]:
        notes.append(run_case(flags))
        FIGURES.write_text(json.dumps(notes, indent=1), encoding="utf8")
        print(json.dumps(notes[-1]), flush=True)
    if any("failed" not in case for case in notes):
        print(f"\n{body_of(notes)}")
        if options["write"] == "True":
            write_section("time-promise", "Estimated and actual time", body_of(notes), notes)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
