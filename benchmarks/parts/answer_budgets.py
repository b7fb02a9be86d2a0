"""The least budget in which commands that generate and convert run, found by bisection."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.page import markdown
from benchmarks.parts.children import run as run_child
from benchmarks.parts.children import words_of
from benchmarks.parts.hard_limit import HardLimit
from benchmarks.parts.large_inputs import free_port
from benchmarks.parts.rows import write_rows
from support.units import MIB, format_size

STEP = 4  # MiB, down to which it is halved
AMPLE = "4G"
MOST = 4096  # MiB, beyond which nothing larger is tried
ABOVE = (1.05, 1.15, 1.3)  # times the smallest budget that was accepted, run as well
USED_SHARE = 0.9  # of a budget, that a run has to fit in to be accepted
OVER_MARK = "over the memory budget"
Flags = dict[str, Any]


def cases(model: Path, adapter: Path, data: Path, pairs: Path, preferences: Path) -> dict[str, Flags]:
    """Commands with their flags; `said`: what is written to standard input."""
    asked: Flags = {"command": "generate", "model": model, "input": data, "max_seq_len": 1024, "max_new_tokens": 40}
    measured = {"model": model, "validation_file": pairs, "max_seq_len": 256}
    return {
        "generate, greedy": asked,
        "generate, sampled": {**asked, "temperature": 1.0, "top_p": 0.9},
        "generate, 16 beams": {**asked, "num_beams": 16},
        "chat": {**asked, "command": "chat", "input": None, "said": ("what runs under the bridge " * 40 + "\n") * 2},
        "chat, short questions": {**asked, "command": "chat", "input": None, "said": "what runs?\nand where?\n"},
        "evaluate with answers": {"command": "evaluate", **measured, "eval_generate_rows": 32},
        "quantize": {"command": "quantize", **measured, "eval_rows": 32},
        "merge": {"command": "merge", "model": model, "adapter": adapter},
        "export to CTranslate2": {"command": "export", "model": model, "format": "ctranslate2"},
        "export to ONNX": {"command": "export", "model": model, "format": "onnx"},
        "dpo with answers": {
            "command": "dpo",
            "finetune_from": model,
            "train_file": preferences,
            "max_steps": 4,
            "eval_steps": 2,
            "eval_generate_rows": 16,
            "sample_rows": 0,
            "effective_batch_size": 4,
            "max_seq_len": 128,
        },
    }


def run(flags: Flags, budget: str, limit: HardLimit | None = None) -> dict[str, Any]:
    """One command in folders that are gone afterwards: exit code, what it said, and the peak of its process tree.

    Args:
        limit: that the command enters before it starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        own: Flags = {"memory_budget": budget, **flags}
        command, said, client = own.pop("command"), own.pop("said", ""), own.pop("client", None)
        if command not in ("merge", "export"):
            own["num_threads"] = 1
        if command in ("evaluate", "quantize", "dpo"):
            own["cache_dir"] = f"{folder}/cache"
        if command in ("generate", "quantize", "merge", "export"):
            own["output"] = f"{folder}/made"
        if command == "embed":
            own["output"] = f"{folder}/made.npz"
        if command == "serve":
            own["port"] = free_port()
            client = partial(client, own["port"])
        if command == "dpo":
            own |= {"output_dir": f"{folder}/out", "log_dir": f"{folder}/logs"}
        words = words_of({name: value for name, value in own.items() if value is not None})
        child = run_child(
            ["train_low_mem.py", command, *words],
            environment={"OMP_NUM_THREADS": "1"},
            enter=limit.enter if limit else None,
            said=said,
            beside=client,
        )
    return {
        "budget": budget,
        "exit": child.returncode,
        "peak": max(child.marked_bytes, child.peak_bytes),
        "over": OVER_MARK in child.messages,
        "told": child.messages[-300:],
    }


def close_in(flags: Flags) -> dict[str, list[dict[str, Any]]]:
    """`runs` of one command: with an ample budget, down to the smallest that is accepted, and some above that.

    `limited`: the largest of these once more with a hard limit of the same size, where a control group can be made. A
    command leaves a part of a hard limit free, so that below it refuses what the smallest budget holds.
    """
    ample = run(flags, AMPLE)
    runs = [ample]

    def is_refused(budget: int) -> bool:
        runs.append(run(flags, f"{budget}M"))
        return runs[-1]["exit"] == 3 and not runs[-1]["over"]

    refused = 64
    accepted = int(ample["peak"] / USED_SHARE / MIB) + 1
    while is_refused(accepted) and accepted < MOST:
        refused = accepted
        accepted = int(accepted * ABOVE[1])
    while accepted - refused > STEP:
        middle = (accepted + refused) // 2
        if is_refused(middle):
            refused = middle
        else:
            accepted = middle
    budgets = [int(accepted * times) for times in ABOVE]
    runs += [run(flags, f"{budget}M") for budget in budgets]
    limited = list[dict[str, Any]]()
    if not HardLimit.why_not():
        with HardLimit(budgets[-1] * MIB) as limit:
            limited.append(run(flags, f"{budgets[-1]}M", limit))
    return {"runs": runs, "limited": limited}


def judged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What became of the two rules.

    Returns:
        smallest: MiB accepted. share: highest peak over its budget. over, wrong: runs above their budget, and runs that
            ended otherwise than done or refused. wasted: how much of the largest refused budget the smallest accepted
                run took.
    """
    held = [one for one in runs if one["budget"] != AMPLE]
    sizes = {id(one): int(one["budget"].rstrip("M")) for one in held}
    done = [one for one in held if one["exit"] == 0 or one["over"]]
    refused = [sizes[id(one)] for one in held if one["exit"] == 3 and not one["over"]]
    least = min(done, key=lambda one: sizes[id(one)], default=None)
    shares = [one["peak"] / MIB / sizes[id(one)] for one in done]
    return {
        "smallest": sizes[id(least)] if least else None,
        "least_peak": least["peak"] if least else 0,
        "share": max(shares, default=0.0),
        "over": sum(share > 1 for share in shares),
        "wrong": sum(one["exit"] not in (0, 3) for one in runs),
        "wasted": least["peak"] / MIB / max(refused) if least and refused else 1.0,
    }


def answers_body(found: list[dict[str, Any]]) -> str:
    """Table of the commands."""
    rows = []
    for case in found:
        j = judged(case["runs"])
        rows.append(
            [
                case["flags"],
                str(len(case["runs"])),
                format_size(case["runs"][0]["peak"]),
                f"{j['smallest']} MiB",
                format_size(j["least_peak"]),
                f"{j['share']:.2f}",
                f"{j['wasted']:.2f}",
                str(j["over"]),
                str(j["wrong"]),
                ", ".join(f"exit code {one['exit']}" for one in case.get("limited", [])) or "not run",
            ]
        )
    return (
        "The smallest accepted budget is found by bisection; peaks are anonymous memory of the process tree. Kept: "
        "no peak is above its budget. Used: the "
        f"smallest accepted run takes at least {USED_SHARE} of the largest budget that was refused.\n\n"
        + markdown(
            [
                "command",
                "runs",
                "peak under 4 GiB",
                "smallest budget",
                "its peak",
                "highest peak / budget",
                "its peak / largest refused",
                "above",
                "failed",
                "under a hard limit",
            ],
            rows,
        )
    )


def write_prompts(path: Path, sentence: str) -> None:
    """Prompts of 3 to 1,000 letters."""
    text = (sentence + " ") * 12
    write_rows(path, [{"prompt": text[: 3 + 83 * number % 997]} for number in range(24)])


def write_preferences(path: Path, sentence: str) -> None:
    """Preferences of like lengths."""
    words = sentence.split()
    rows = [
        {"prompt": " ".join(words[n % 7 :]), "chosen": words[2 + n % 9], "rejected": words[1 + n % 9]}
        for n in range(200)
    ]
    write_rows(path, rows)
