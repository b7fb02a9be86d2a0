"""`doctor --check`: a device's numbers against the CPU's, its memory against the plan, and its speed.

One page, one JSON file, one verdict. Each part runs in a child process with a time limit, so that a crash is a line of the
page. What is wrong comes with the setting that avoids it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import childproc
from childproc import ChildDied
from commands.diagnosis.trials import request_of, run_trials
from devices.environment import prepare_environment
from language import say
from memory.estimate.time import Amount, flops_of
from memory.estimate.workload import Machine
from settings.declared import Config
from settings.errors import DoesNotFit, UserError
from settings.precedence import model_presets
from settings.program import SCRIPT
from storage import make_folder, write_text
from training.report.progress import Progress
from training.setup.resolving import Rows, resolve
from units import GIB, format_size

PART_SECONDS = 120.0  # longest part
STEP_SECONDS, STEP_SHARE = 0.4, 0.4  # a step is to take so long, at this share of the rate of products
FAST = 2e12  # FLOP/s from which t5-small is trained, and not tiny
MOST_ROWS, ROW_BYTES = 256, GIB // 4  # of t5-small in Hugging Face's step
PEAK_BAR = 1.1  # times the plan
MODES = ("standard", "low", "ultra")


@dataclass(frozen=True)
class Finding:
    """One line of the check.

    Args:
        part: of the check. what: was looked at. found, bar: as they are shown; an empty bar: a fact.
        is_right: None: not judged. avoid: the setting that avoids what is wrong.
    """

    part: str
    what: str
    found: str
    bar: str = ""
    is_right: bool | None = None
    avoid: str = ""


def check(config: Config) -> None:
    """Check the device of the settings; print the page, or JSON for programs, and write `device_check.json` into the log folder.

    Raises:
        UserError: the device is not here, or a check failed.
    """
    began, progress, findings = time.perf_counter(), Progress(1), list[Finding]()
    for part in parts(config):
        findings += part
        if part and not config.plan.json:
            progress.table(part[0].part, [("what", "found", "at most", ""), *map(_cells, part)])
            sys.stdout.flush()
    judged = [finding for finding in findings if finding.is_right is not None]
    wrong = [finding for finding in judged if not finding.is_right]
    verdict = say("{count} checks passed", count=len(judged) - len(wrong)) if not wrong else say(
        "{wrong} of {count} checks failed", wrong=len(wrong), count=len(judged)
    )  # fmt: skip
    report = {
        "verdict": str(verdict), "seconds": round(time.perf_counter() - began, 1), "findings": [asdict(f) for f in findings],
    }  # fmt: skip
    make_folder(Path(config.run.log_dir))
    place = Path(config.run.log_dir) / "device_check.json"
    write_text(place, json.dumps(report, indent=1) + "\n")
    if config.plan.json:
        print(json.dumps(report, indent=1))
    else:
        progress.table(say("verdict"), [(str(verdict), f"{report['seconds']:.0f} s", str(place))])
    if wrong:
        raise UserError(*(_refusal(finding) for finding in wrong))


def parts(config: Config) -> Iterator[list[Finding]]:
    """The findings of each part, as it ends.

    Raises:
        UserError: the device is not here.
    """
    yield _asked("facts", "commands.diagnosis.device_speed:facts", config)
    yield _asked("numbers", "commands.diagnosis.device_numbers:numbers", config)
    try:
        looked, machine = _call("commands.doctor:look", config, True)
    except ChildDied as death:
        yield [_died("memory", death)]
        return
    device = next(one for one in looked["devices"] if not one["missing"])
    config = sized(config, device)
    rows, findings = list[dict[str, Any]](), list[Finding]()
    for mode in MODES:
        rows += _trials(config.changed(memory_mode=mode), mode, machine)
        findings.append(_peak(rows[-1]))
    if rows[0]["predicted_bytes"]:
        half = max(rows[0]["predicted_bytes"] // 2, int(1.05 * (rows[-1]["predicted_bytes"] or 0)))
        tight = replace(machine, budget_bytes=half)
        (row,) = _trials(config.changed(memory_budget=half), f"budget {format_size(half)}", tight)
        findings.append(_peak(row, half))
    yield findings
    yield _speed(config, machine, device)
    if device["count"] > 1:
        yield [_several(config)]


def sized(config: Config, device: dict[str, Any]) -> Config:
    """The settings with a model and rows that take the device some tenths of a second a step."""
    rate = device["rates"][device["compute"]]
    is_fast = rate > FAST
    if not config.given("model_preset"):
        config = config.changed(**model_presets()["t5-small" if is_fast else "tiny"])
    source, target = (512, 114) if is_fast else (128, 32)
    row = 3 * sum(flops_of(config.model, Amount.of_rows(1, source, target)))
    rows = min(MOST_ROWS, max(4, int(STEP_SHARE * rate * STEP_SECONDS / row)))
    if device["is_separate_memory"]:
        rows = min(rows, max(4, device["free_bytes"] // ROW_BYTES))
    lengths = {"max_seq_len": source, "max_target_len": target, "sample_rows": 0, "objective": "pairs"}
    return config.changed(effective_batch_size=2 ** (rows.bit_length() - 1), **lengths)


def _call(function: str, *arguments: Any) -> Any:
    limits = {"max_cpu": 16 * PART_SECONDS, "patience": 1 / 16}  # 16 threads use 16 seconds of processor time in one
    return childproc.call(function, *arguments, setup=prepare_environment, is_quiet=True, **limits)


def _asked(part: str, function: str, config: Config) -> list[Finding]:
    try:
        found: list[Finding] = _call(function, config)
        return found
    except ChildDied as death:
        return [_died(part, death)]


def _died(part: str, death: ChildDied) -> Finding:
    return Finding(part, "this part", f"ended: {death}", "", False, "--device=cpu")


def _trials(config: Config, label: str, machine: Machine) -> list[dict[str, Any]]:
    return [row for row in run_trials([("step", label, config)], machine, lambda _: None) if row["kind"] == "step"]


def _peak(row: dict[str, Any], budget: int = 0) -> Finding:
    what = f"peak, {row['label']}"
    if row["outcome"] or not row["measured_bytes"]:
        return Finding("memory", what, str(row["outcome"]), "", False, "--memory_mode=ultra")
    planned, measured = row["predicted_bytes"], row["measured_bytes"]
    told = format_size(measured)
    if row["tensor_bytes"]:
        told += f" ({format_size(row['tensor_bytes'])} of tensors; {format_size(row['used_bytes'])} of the card in use)"
    bar = f"{format_size(planned)} planned"
    most = int(PEAK_BAR * planned)
    if budget:
        bar = f"{format_size(budget)}, {bar}"
        most = budget
    return Finding("memory", what, told, bar, measured <= most, "a smaller --memory_budget")


def _speed(config: Config, machine: Machine, device: dict[str, Any]) -> list[Finding]:
    standard = config.changed(memory_mode="standard")
    try:
        spec = resolve(standard, machine, Rows.as_set(standard))
        found, mine = _call("commands.diagnosis.device_speed:steps", request_of(standard, spec))
    except (ChildDied, DoesNotFit) as error:
        return [Finding("speed", "this part", f"ended: {error}", "", False, "--device=cpu")]
    findings: list[Finding] = found
    rows, source, target = spec.work.rows, spec.rows.source_tokens, spec.rows.target_tokens
    flops = 3 * sum(flops_of(config.model, Amount.of_rows(rows, source, target)))
    share = flops / mine.seconds / device["rates"][device["compute"]]
    size = f"{rows} rows of {source} + {target} tokens"
    findings.append(Finding("speed", "share of the rate of products", f"{share:.0%} of {device['compute']}; {size}"))
    if importlib.util.find_spec("transformers") is None:
        return [*findings, Finding("speed", "beside Hugging Face T5", "transformers is not installed")]
    try:
        step = (config.model, rows, source, target, device["name"], device["compute"])
        other = _call("commands.diagnosis.device_speed:peer", *step)
        told = f"{other.seconds / mine.seconds:.2f} times its speed"
        if other.tensor_bytes:
            told += f" in {mine.tensor_bytes / other.tensor_bytes:.2f} of its memory"
    except ChildDied as death:
        told = f"it ended: {death}"
    return [*findings, Finding("speed", "beside Hugging Face T5", told)]


def _several(config: Config) -> Finding:
    """The losses of two processes beside those of one, of the program's own runs."""
    what = "losses of two processes and of one"
    flags = [
        "--model_preset=tiny", "--vocab_size=400", "--max_steps=3", "--effective_batch_size=8", "--max_seq_len=64", "--log_steps=1",
        "--mixed_precision=no", "--eval_rows=2", "--sample_rows=0", f"--device={config.run.device}",
    ]  # fmt: skip
    launchers = {"one": [], "two": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(
            "".join(f"line {n} of a text that is here to be learned\n" for n in range(400)), encoding="utf8"
        )
        for name, launcher in launchers.items():
            places = [f"--{kind}_dir={folder}/{kind}" for kind in ("output", "log", "cache")]
            words = [sys.executable, *launcher, SCRIPT, "train", f"--train_file={text}", f"--run_name={name}", *places]
            done = childproc.run([*words, *flags], PART_SECONDS)
            if done.returncode:
                last = [line for line in done.stderr.strip().splitlines() if line.strip()][-1:]
                return Finding(
                    "several devices", what, f"failed: {last[0] if last else done.returncode}", "", False, "one process"
                )
            events = map(
                json.loads, (Path(folder) / "log" / name / "metrics.jsonl").read_text(encoding="utf8").splitlines()
            )
            losses[name] = [event["loss"] for event in events if event["event"] == "step"]
    error = max(abs(a / b - 1) for a, b in zip(losses["two"], losses["one"], strict=True))
    return Finding("several devices", what, f"{error:.1e}", "1e-4", error < 1e-4, "one process")


def _cells(finding: Finding) -> tuple[str, ...]:
    mark = {True: "ok", False: "WRONG", None: ""}[finding.is_right]
    return finding.what, finding.found, finding.bar, mark


def _refusal(finding: Finding) -> str:
    told = f"{finding.part}, {finding.what}: {finding.found}"
    told += f" (at most {finding.bar})" if finding.bar else ""
    return f"{told}; avoid it with {finding.avoid}" if finding.avoid else told
