"""Training models as large as the memory, or larger: `python -m benchmarks.larger_models [CASE ...] [--rows=1,16] [--steps=2]`.

Each case is a whole run in a control group with a hard limit that counts anonymous memory and pages of files: weights drawn,
evaluated, a few steps over rows of 512 + 114 tokens, evaluated and saved. Told are the group's own highest use, the most
anonymous memory of the process, seconds a step and what of them goes where, what went to and came from the disk, and what the products only would take
at the measured rate. Threads are those of OMP_NUM_THREADS, else all cores. Beside it what Hugging Face with AdamW holds for the same model: 16 bytes a weight in fp32, before any
activation; with --peers=780M it is measured too, for the cases named, on as many rows as a case has. Cases are noted as they end;
--fresh begins anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.parts import children
from benchmarks.parts.hard_limit import HardLimit
from benchmarks.parts.results import ROOT, markdown, write_section
from benchmarks.parts.rows import read_rows
from benchmarks.parts.watched import first_event
from devices import machine_file, processor
from devices.cores import usable_cores
from memory.estimate.time import Amount, flops_of
from model.shapes import weight_counts
from settings.loading import load
from units import GIB, format_size

CACHE = ROOT / "data" / "cache" / "larger_models"
FIGURES = CACHE / "figures.json"
SOURCE, TARGET, STEPS = 512, 114, 2
OPTIONS = {"rows": "1,16", "steps": str(STEPS), "peers": "", "fresh": "False"}
PEER_BYTES = 16  # a weight: itself, its gradient and two moments in fp32
Flags = dict[str, Any]
LORA: Flags = {"is_finetune": True, "lora_rank": 8, "weights_in": "file"}
# case -> hard limit in GiB, and flags; adapters go over the checkpoint of the case that their name begins with
CASES: dict[str, tuple[float, Flags]] = {
    "780M": (3.5, {"model_preset": "t5-v1.1-large", "memory_budget": "3200M"}),
    "780M-file": (1.0, {"model_preset": "t5-v1.1-large", "memory_budget": "900M"}),
    "3B": (7.5, {"model_preset": "t5-3b", "memory_budget": "7000M"}),
    "3B-file": (4.0, {"model_preset": "t5-3b", "memory_budget": "3700M"}),
    "11B": (10.0, {"model_preset": "t5-11b", "memory_budget": "9500M"}),
    "3B-lora": (1.0, {**LORA, "lora_base": "int8", "memory_budget": "950M"}),
    "3B-lora-int4": (1.0, {**LORA, "lora_base": "int4", "memory_budget": "990M"}),
    "11B-lora": (2.5, {**LORA, "lora_base": "int8", "memory_budget": "2400M"}),
    "11B-lora-int4": (2.5, {**LORA, "lora_base": "int4", "memory_budget": "2400M"}),
}  # fmt: skip


def data_file() -> Path:
    """Pairs that are cut to the full length, made once."""
    path = CACHE / "pairs.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"prompt": "the river runs under a bridge " * 40, "response": "small boats wait " * 20})
        path.write_text("".join(f'{line[:-2]} {number}"}}\n' for number in range(200)), encoding="utf8")
    return path


def run_case(name: str, rows: int, steps: int) -> dict[str, Any]:
    """One run under its limit: how it ended, and what it took."""
    gib, asked = CASES[name]
    folder = CACHE / "runs"
    base = {"finetune_from": folder / _base_of(name)} if "lora_rank" in asked else {}
    flags = {
        "train_file": data_file(), "objective": "pairs", "tokenizer_type": "byte", "max_seq_len": SOURCE,
        "max_target_len": TARGET, "effective_batch_size": rows, "max_steps": steps, "save_steps": 100, "eval_steps": 100,
        "eval_rows": 1, "sample_rows": 0, "keep_latest_n_ckp": 1, "probe": False, "output_dir": folder, "log_dir": CACHE / "logs",
        "cache_dir": CACHE / "data", "run_name": name, "overwrite": True, **asked, **base,
    }  # fmt: skip
    command = [sys.executable, "train_low_mem.py", "train", *children.words_of(flags)]
    peak = 0
    with HardLimit(int(gib * GIB)) as limit, (CACHE / f"{name}.txt").open("w") as told:
        began = time.monotonic()
        child = subprocess.Popen(command, cwd=ROOT, stdout=told, stderr=told, preexec_fn=limit.enter)
        moved: dict[str, int] = {}
        while child.poll() is None:
            peak, moved = max(peak, children.peak_of_process(child.pid)), _moved(child.pid) or moved
            time.sleep(0.1)
        used = int((limit.folder / ("memory.max_usage_in_bytes" if limit.is_v1 else "memory.peak")).read_text())
    events = read_rows(CACHE / "logs" / name / "metrics.jsonl") if child.returncode == 0 else []
    return {
        "case": name, "rows": rows, "limit_bytes": int(gib * GIB), "exit": child.returncode, "peak_bytes": peak, "threads": threads_of_run(),
        "group_bytes": used, "load": os.getloadavg()[1], "seconds": time.monotonic() - began, "disk": moved,
        "steps": [event["seconds"] for event in events if event["event"] == "step"],
        "parts": [[event.get("weights_wait_seconds", 0.0), event["update_seconds"]] for event in events if event["event"] == "step"],
        "plan": first_event(events, "plan"),
    }  # fmt: skip


def run_peer(name: str, rows: int) -> dict[str, float]:
    """Hugging Face's T5 of a case's shape in fp32 with AdamW on the same shape of rows: most anonymous memory, seconds a step."""
    words = ["shipped", CASES[name][1]["model_preset"], rows, SOURCE, TARGET, STEPS]
    child = children.must_run(["-m", "benchmarks.parts.one_system", *map(str, words)])
    return {
        "peak_bytes": child.peak_bytes, "seconds": sum(child.figures["seconds"]) / STEPS, "load": os.getloadavg()[0],
    }  # fmt: skip


def _peer_cell(peer: dict[str, float] | None) -> str:
    if peer is None:
        return ""
    return f"{format_size(int(peer['peak_bytes']))}, {peer['seconds']:.1f} s a step (load {peer['load']:.0f})"


def _base_of(name: str) -> str:
    """The case whose model a case has, or adapts."""
    return name.partition("-")[0]


def _shares(case: dict[str, Any]) -> str:
    """Of the same steps that the seconds are told of: computing, waiting for the disk, updating."""
    steps, parts = (case.get(name, [])[1:] or case.get(name, []) for name in ("steps", "parts"))
    if not parts:
        return ""
    waiting, updating = (100 * sum(column) / sum(steps) for column in zip(*parts, strict=True))
    return f"{100 - waiting - updating:.0f} / {waiting:.0f} / {updating:.0f}%"


def _moved(pid: int) -> dict[str, int]:
    """Bytes that a process has read from and written to disks so far."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        counted = {word: int(count) for word, count in (line.split(": ") for line in lines)}
        return {"read": counted["read_bytes"], "written": counted["write_bytes"]}
    return {}


def threads_of_run() -> int:
    """As many as a run takes by itself."""
    return int(os.environ.get("OMP_NUM_THREADS") or usable_cores())


def product_seconds(model_preset: str, rows: int, compute: str, threads: int) -> float:
    """What the products of a step take at the measured rate, each block once more for backward; 0 where none is known."""
    known = machine_file.of_cpu(processor.describe_here(), threads)
    rate = 0.0 if known is None else dict(known.rates_with(threads)).get(compute, 0.0)
    config = load("train", {"model_preset": model_preset, "preset": "none"})
    return 4 * sum(flops_of(config.model, Amount.of_rows(rows, SOURCE, TARGET))) / rate if rate else 0.0


def body(cases: list[dict[str, Any]]) -> str:
    """The table."""
    rows = []
    for case in cases:
        preset = str(CASES[_base_of(case["case"])][1]["model_preset"])
        count = weight_counts(load("train", {"model_preset": preset, "preset": "none"}).model)["total"]
        choice = case["plan"].get("choice", {})
        later = case["steps"][1:] or case["steps"]
        seconds = sum(later) / len(later) if later else 0.0
        products = product_seconds(preset, case["rows"], choice.get("compute", "float32"), case["threads"])
        rows.append(
            [
                case["case"], f"{case['rows']}", f"{case['threads']}", format_size(case["limit_bytes"]),
                format_size(case["group_bytes"]) if case["exit"] == 0 else f"exit code {case['exit']}",
                format_size(case["peak_bytes"]), format_size(case["plan"].get("peak_bytes", 0)),
                f"{choice.get('offloaded_blocks', 0)} of {case['plan'].get('num_blocks', 0)}", f"{seconds:.1f}",
                f"{case['plan'].get('seconds', 0.0):.1f}", f"{case['load']:.0f}", f"{products:.1f}" if products else "-", _shares(case),
                f"{format_size(case['disk'].get('read', 0))} / {format_size(case['disk'].get('written', 0))}",
                format_size(PEER_BYTES * count),
                _peer_cell(case.get("peer")),
            ]
        )  # fmt: skip
    return (
        f"Rows of {SOURCE} + {TARGET} tokens; whole runs: weights initialised (adapters: the base loaded), evaluated, trained, saved. "
        "If the load of the machine is above its number of cores, times include other programs.\n\n"
        + markdown(
            ["case", "rows a step", "threads", "hard limit", "control group, files included", "anonymous", "planned", "blocks in the file", "s a step",
             "planned", "load of the machine", "products only", "computing / waiting for the disk / updating", "disk read / written", "Hugging Face with AdamW, weights and state", "measured as a whole"],
            rows,
        )
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run the cases that are named, all by default, and write the page."""
    named, options = children.options_of(arguments, OPTIONS, str(__doc__))
    named = named or ([] if options["peers"] else list(CASES))
    if HardLimit.why_not():
        sys.exit(HardLimit.why_not())
    CACHE.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    noted = json.loads(FIGURES.read_text(encoding="utf8")) if FIGURES.is_file() and options["fresh"] == "False" else []
    for name in named:
        for rows in map(int, options["rows"].split(",")):
            case = run_case(name, rows, int(options["steps"]))
            noted = [one for one in noted if (one["case"], one["rows"]) != (name, rows)] + [case]
            FIGURES.write_text(json.dumps(noted, indent=1), encoding="utf8")
            print(json.dumps({key: value for key, value in case.items() if key != "plan"}), flush=True)
    for case in noted:
        if case["case"] in options["peers"].split(","):
            case["peer"] = run_peer(case["case"], case["rows"])
            FIGURES.write_text(json.dumps(noted, indent=1), encoding="utf8")
    order = list(CASES)
    noted.sort(key=lambda case: (order.index(case["case"]), case["rows"]))
    write_section("larger-models", "Models as large as memory, or larger", body(noted), noted)


if __name__ == "__main__":
    main(sys.argv[1:])
