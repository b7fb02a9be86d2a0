"""Measured peaks against budgets and plans: `python -m benchmarks.contract [accuracy] [budgets] [keeping] [answers]
[--cases=N] [--fresh]`.

accuracy: real training runs, models, modes, optimizers and dtypes on rows that are ragged, short or all of one length,
the usual ways for 300 steps; the peak that the plan has predicted, before and after its probe, beside the peak that
the kernel has seen, and the seconds of a step as planned beside their median. budgets: one model under rising budgets,
each of which should be used. keeping: pairs of a configuration and a budget, drawn at random, run under a hard cgroup
limit of budget + 5%: none may be killed, each finishes or is refused before it trains. answers: commands that answer
and convert, under budgets closed in on by halving: no peak above its budget, none refused that fits at 90% of it, and
none killed under a hard limit of that size. Every case is noted as it ends, so that an interrupted benchmark continues
where it was; --cases=N runs at most N more. The page gets tables of all cases so far.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.page import ROOT, SummaryRow, show_section
from benchmarks.parts import children, large_inputs, watched
from benchmarks.parts.answer_budgets import answers_body, cases, close_in, judged, write_preferences, write_prompts
from benchmarks.parts.contract_page import (
    ROOM_ABOVE_BUDGET,
    accuracy_body,
    accuracy_summary,
    budgets_body,
    keeping_body,
    keeping_summary,
)
from benchmarks.parts.hard_limit import HardLimit
from benchmarks.parts.rows import write_rows
from devices.cores import usable_cores
from support.units import MIB

CACHE = ROOT / "data" / "cache" / "contract"
FIGURES = CACHE / "figures.json"
WORDS = "the river runs under a stone bridge where small boats wait for morning light and people talk of rain"
KEEPING_CASES = 24
BUDGETS = ("1200M", "2G", "4G", "8G")
MANY_STEPS, LIMITED_STEPS, STEPS = 300, 100, 40  # of the usual ways, under a hard limit, and of the others
MANY: dict[str, Any] = {"max_steps": MANY_STEPS}

Flags = dict[str, Any]
BASE: Flags = {"is_finetune": True, "finetune_from": "base"}  # a folder that is trained once
FAMILIES: dict[str, Flags] = {  # what the rows are like, and how many a step sees
    "ragged": {"max_seq_len": 256, "effective_batch_size": 8},
    "short": {"max_seq_len": 32, "effective_batch_size": 128},
    "equal": {"max_seq_len": 256, "effective_batch_size": 4, "objective": "span"},
}
LETTERS = {"ragged": (10, 250), "short": (4, 14)}  # of prompt and of response, least and most


def configurations() -> list[Flags]:
    """Models, modes, optimizers and dtypes that differ in one or two things from a common one."""
    rows: list[Flags] = [MANY, {"memory_mode": "low"}, {"memory_mode": "ultra", **MANY}]
    rows += [{"optimizer": "adamw", "max_grad_norm": 1.0}, {"optimizer": "adamw_8bit"}]
    rows += [{"dropout_rate": 0.1}, {"dropout_rate": 0.1, "memory_mode": "ultra"}]
    rows += [{"mixed_precision": "no"}, {"mixed_precision": "no", "dropout_rate": 0.1, "memory_mode": "ultra", **MANY}]
    rows += [{"mixed_precision": "bf16"}, {"compiled_kernels": False}]
    rows += [{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_ff": 700}]
    rows += [{"d_model": 128, "d_ff": 512, "vocab_size": 64000}, {"num_layers": 6, "num_decoder_layers": 4}]
    rows += [{**BASE, "lora_rank": 8}, {"model_preset": "t5-small", "max_steps": 24}]
    rows += [{"model_preset": "t5-small", "memory_mode": "ultra", "max_steps": 24}]
    return rows


def accuracy_cases() -> list[Flags]:
    """Every configuration on every family of rows, and large models on one."""
    rows = [{"rows": family, **row} for row in configurations() for family in FAMILIES]
    large: Flags = {"model_preset": "chatlm-0.2b", "memory_mode": "ultra", "max_steps": 6}
    return rows + [{"rows": family, **large} for family in FAMILIES]


def keeping_cases() -> list[Flags]:
    """Of those, some under budgets at random, always the same; some budgets are too small for their configuration."""
    draw = random.Random(20)
    small = [row for row in configurations() if "model_preset" not in row and "finetune_from" not in row]
    families = list(FAMILIES) * (KEEPING_CASES // len(FAMILIES))
    return [
        {
            "rows": family,
            **draw.choice(small),
            "max_steps": LIMITED_STEPS,
            "memory_budget": f"{draw.randrange(210, 420, 10)}M",
        }
        for family in families
    ]


def budget_cases() -> list[Flags]:
    """One model with growing budgets, on all cores: each should use what it is given."""
    common = {
        "model_preset": "t5-base",
        "effective_batch_size": 16,
        "max_seq_len": 256,
        "max_steps": 2,
        "eval_steps": 2,
        "eval_rows": 4,
        "sample_rows": 0,
        "num_threads": usable_cores(),
    }
    return [{**common, "memory_budget": budget} for budget in BUDGETS]


def data_file(family: str) -> Path:
    """A file of rows of that family, made once: pairs of lengths at random, or long texts that fill every row."""
    path = CACHE / f"{family}.jsonl"
    if not path.is_file():
        draw, words = random.Random(0), WORDS.split()

        def text(letters: int) -> str:
            return " ".join(draw.choice(words) for _ in range(1 + letters // 5))[:letters]

        lines = [{"text": text(3000)} for _ in range(400)]
        if family in LETTERS:
            sides = ("prompt", "response")
            lines = [{side: text(draw.randint(*LETTERS[family])) for side in sides} for _ in range(4000)]
        write_rows(path, lines)
    return path


def base_folder() -> Path:
    """A model to begin with, trained for one step, once."""
    return _trained_once("base", {"model_preset": "tiny", "train_file": data_file("ragged")})


def adapter_folder() -> Path:
    """An adapter over that model, trained for one step, once."""
    flags = {**BASE, "finetune_from": base_folder(), "train_file": data_file("short"), "lora_rank": 8}
    return _trained_once("adapter", flags)


def _trained_once(name: str, flags: Flags) -> Path:
    folder = CACHE / "models" / name
    if not any(folder.glob("*.safetensors")):
        common = {
            "cache_dir": CACHE,
            "max_steps": 1,
            "max_seq_len": 64,
            "output_dir": folder.parent,
            "run_name": name,
            "overwrite": True,
        }
        made = watched.train({**flags, **common})
        if made.returncode:
            sys.exit(made.messages[-3000:])
    return folder


def run_case(flags: Flags, limit: HardLimit | None = None) -> dict[str, Any]:
    """One training run in a process of its own: its exit code, what it planned, and the most that it held."""
    base = {"finetune_from": base_folder()} if "finetune_from" in flags else {}
    family = str(flags.get("rows", "ragged"))
    common = {
        "model_preset": "tiny",
        "train_file": data_file(family),
        "cache_dir": CACHE,
        **FAMILIES[family],
        "max_steps": STEPS,
        "eval_steps": STEPS,
        "eval_rows": 32,
        "sample_rows": 0,
    }
    own = {name: value for name, value in flags.items() if name != "rows"}
    run = watched.train({**common, **own, **base}, limit=limit)
    predicted = run.plan.get("peak_bytes")
    seconds = [step["seconds"] for step in run.steps[1:]]  # The first one warms up.
    return {
        "flags": flags,
        "exit": run.returncode,
        "measured": run.peak_bytes,
        "predicted": predicted,
        "unprobed": run.plan.get("unprobed_peak_bytes") or predicted,
        "trained": bool(run.steps),
        "told": run.messages.strip()[-400:],
        "tokens_per_second": run.tokens_per_second,
        "choice": run.plan.get("choice", {}),
        "planned_seconds": run.plan.get("seconds"),
        "step_seconds": statistics.median(seconds) if seconds else None,
    }


def run_limited(flags: Flags) -> dict[str, Any]:
    """The same under a hard limit."""
    budget = int(flags["memory_budget"].rstrip("M")) * MIB
    with HardLimit(int(budget * (1 + ROOM_ABOVE_BUDGET))) as limit:
        return run_case(flags, limit)


def works_of(part: str) -> list[tuple[Any, Callable[[], dict[str, Any]]]]:
    """The cases of a part: what each is noted by, and what runs it."""
    if part == "accuracy":
        return [(flags, partial(run_case, {"probe": True, **flags})) for flags in accuracy_cases()]
    if part == "budgets":
        return [(flags, partial(run_case, {"probe": False, **flags})) for flags in budget_cases()]
    if part == "keeping":
        return [(flags, partial(run_limited, flags)) for flags in keeping_cases()]
    prompts, preferences = CACHE / "prompts.jsonl", CACHE / "preferences.jsonl"
    write_prompts(prompts, WORDS)
    write_preferences(preferences, WORDS)
    commands = cases(base_folder(), adapter_folder(), prompts, data_file("short"), preferences)
    commands |= large_inputs.cases(base_folder(), CACHE, WORDS)
    return [(name, partial(close_in, flags)) for name, flags in commands.items()]


def run_part(part: str, most: int, notes: dict[str, list[dict[str, Any]]]) -> None:
    """Run what is not noted yet, at most `most` cases."""
    known = [case["flags"] for case in notes.setdefault(part, [])]
    for flags, run in [work for work in works_of(part) if json.loads(json.dumps(work[0])) not in known][:most]:
        case = {**run(), "flags": flags}
        notes[part].append(case)
        FIGURES.write_text(json.dumps(notes, indent=1), encoding="utf8")
        told = case
        if part == "answers":
            limited = [run["exit"] for run in case["limited"]]
            told = {"flags": flags, **judged(case["runs"]), "under_a_hard_limit": limited}
        print(json.dumps({k: v for k, v in told.items() if k != "told" or case["exit"] not in (0, 3)}), flush=True)


PARTS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {
    "accuracy": ("The plan and the measurement", accuracy_body),
    "budgets": ("One model with growing budgets", budgets_body),
    "answers": ("Budgets of the other commands", answers_body),
    "keeping": ("Budgets under a hard limit", keeping_body),
}

SUMMARIES: dict[str, Callable[[list[dict[str, Any]]], list[SummaryRow]]] = {
    "accuracy": accuracy_summary,
    "keeping": keeping_summary,
}


def main(arguments: list[str]) -> None:
    """Run the parts that are named, all by default, and write the page."""
    parts, options = children.options_of(arguments, {"cases": "1000", "fresh": "False"}, str(__doc__))
    parts = parts or list(PARTS)
    CACHE.mkdir(parents=True, exist_ok=True)
    notes = json.loads(FIGURES.read_text(encoding="utf8")) if FIGURES.is_file() and options["fresh"] == "False" else {}
    most = int(options["cases"])
    for part, (heading, body) in PARTS.items():
        if part not in parts:
            continue
        if part == "keeping" and HardLimit.why_not():
            print(f"keeping: skipped, {HardLimit.why_not()}")
            continue
        run_part(part, most, notes)
        summary = SUMMARIES[part](notes[part]) if part in SUMMARIES else []
        show_section(f"contract-{part}", heading, body(notes[part]), notes[part], summary)


if __name__ == "__main__":
    main(sys.argv[1:])
