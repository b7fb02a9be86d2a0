"""The state of each run, read from its files only, for the page and for the terminal.

Only the beginning and the end of a file of metrics are read here: a list of runs costs the same at any length.

| state | how it is known |
|---|---|
| waiting | asked for, and in the queue until there is memory |
| starting | its process lives and has not come to its first step: data and tokenizer are prepared, the plan is made |
| running | its sign of life is younger than 30 s |
| paused | older, and its process is still there: the machine slept, or the process was halted |
| done, stopped, failed | its last sign of life says so |
| died | no sign of life for 30 s, and no process; or its process has ended and waits for its parent (a zombie) |

A sign of life that lies ahead by more than 30 s counts as an old one: the clock was set back since, or is another
machine's.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from board.reader import ODD, Folders
from support.language import say
from support.storage import folder_bytes, remove
from training.report.run_files import (
    HEARTBEAT_FILE,
    LAUNCH_FILE,
    LESS_IS_BETTER,
    METRICS_FILE,
    OWNER_FILE,
    RUN_FILE,
    EventReader,
    LatestEvents,
    Record,
    number_of,
    read_record,
)

SILENT_SECONDS = 30.0
CLOCK_SLACK_SECONDS = 120.0  # A clock may be set by so much between a process's beginning and what it writes.
HEAD_BYTES = 2**16
TAIL_BYTES = 2**15
CONSOLE_FILE = "console.log"
CONSOLE_BYTES = 3000
ALIVE = ("starting", "running", "paused")
RESPONSIVE = ("starting", "running")  # A request is heard soon.
# The states of processes whose parents have not asked how they ended:
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
NUMBERS = ("budget_bytes", "max_steps", "memory_bytes", "peak_bytes", "planned_peak_bytes", "seconds_left", "step")
KIND_OF_FINETUNING = {"true": "finetune", "false": "pretrain"}
LEARNS = {"finetune": "answers", "dpo": "preferences"}


def list_runs(folders: Folders, now: float | None = None) -> list[Record]:
    """How each run stands, the newest first."""
    runs = [run_facts(folders, name, now) for name in folders.names()]
    return sorted(runs, key=lambda run: (run["state"] not in (*ALIVE, "waiting"), -run["started"]))


def run_facts(folders: Folders, name: str, now: float | None = None) -> Record:
    """How one run stands.

    Args:
        now: seconds since 1970; the clock unless a test says otherwise.
    """
    now = time.time() if now is None else now
    logs = folders.log_dir / name
    saved = folders.output_dir / name
    beat = read_record(logs / HEARTBEAT_FILE)
    launch = read_record(logs / LAUNCH_FILE)
    record = read_record(saved / RUN_FILE)
    try:
        return _facts(logs, saved, now, beat, launch, record, _events(logs / METRICS_FILE))
    except ODD:  # Somebody else has written them.
        damaged = _facts(logs, saved, now, {}, {}, {}, [])
        return damaged | {"state": "failed", "reason": say("the files of this run are damaged")}


def _events(path: Path) -> list[Record]:
    """The beginning of a file of metrics, of which `start` and `plan` count, and its end."""
    try:
        head = [event for event in EventReader(path).events(HEAD_BYTES) if event["event"] in ("start", "plan")]
        tail = EventReader(path, max(0, path.stat().st_size - TAIL_BYTES)).events()
        return [*head, *tail]
    except OSError:
        return []


def _facts(
    logs: Path, saved: Path, now: float, beat: Record, launch: Record, record: Record, events: list[Record]
) -> Record:
    """How a run stands by its sign of life, its launch, its record and its events; raises one of ODD for what no run
    writes.
    """
    latest = LatestEvents()
    for event in events:
        latest.add(event)
    state, reason = _state(logs, beat, launch, latest, now)
    is_alive = state in ALIVE
    plan = latest["plan"]
    end = latest["end"]
    settings = latest["start"].get("settings", {})
    # The later ones are surer.
    merged = _merged(
        _identity(launch.get("flags", {})),
        {"planned_peak_bytes": launch.get("planned_peak_bytes"), "process": launch.get("process")},
        _identity(settings),
        {"planned_peak_bytes": plan.get("peak_bytes"), "budget_bytes": plan.get("budget_bytes")},
        {"peak_bytes": latest["memory"].get("peak_bytes"), "step": end.get("step")},
        beat,
        {"kind": record.get("kind"), "objective": record.get("objective")},
        {"peak_bytes": end.get("measured_peak_bytes"), "step": latest["step"].get("step", 0)},
    )
    merged["memory_bytes"] = beat.get("anon_bytes") if is_alive else None
    numbers = {name: number_of(merged.get(name)) for name in NUMBERS}
    seconds_left = numbers["seconds_left"] if state == "running" else None
    losses = [number_of(event.get("loss")) for event in events if event["event"] == "step"]
    times = [record.get("resumed"), record.get("started"), launch.get("asked"), beat.get("started")]
    times += [event.get("time") for event in events[:1]]
    evaluations = [event for event in events if event["event"] == "eval"]
    return {
        **numbers,
        "name": logs.name,
        "state": state,
        "reason": reason,
        "kind": merged.get("kind", "pretrain"),
        "learns": _learns(merged),
        "model": merged.get("model"),
        "data": merged.get("data"),
        "started": max((moment for moment in map(number_of, times) if moment is not None), default=0.0),
        "ended": end.get("time", beat.get("time")),
        "loss": next((loss for loss in reversed(losses) if loss is not None), None),
        "loss_is_number": losses[-1:] != [None],
        "eval_loss": number_of(latest["eval"].get("loss")),
        "tokens_per_second": number_of(latest["step"].get("tokens_per_second")),
        "phase": merged.get("phase") if is_alive else None,
        "doing": dict(merged.get("doing", {})) if state == "starting" else {},
        "process": merged.get("process") if is_alive else None,
        "seconds_left": seconds_left,
        "ends": None if seconds_left is None else beat["time"] + seconds_left,
        "has_checkpoint": (saved / "checkpoints").is_dir(),
        "hears": state in RESPONSIVE and not _is_asked_anew(beat, launch),
        **_best(saved, str(settings.get("metric_for_best") or "loss"), [end.get("best_evaluation", {}), *evaluations]),
    }


def _merged(*records: Mapping[str, Any]) -> Record:
    """One record of several, where each stands over those before with what it knows."""
    return {name: value for record in records for name, value in record.items() if value not in (None, "", "auto")}


def _identity(settings: Mapping[str, Any]) -> Record:
    """What a run trains and on what, by the names that signs of life have for it."""
    return {
        "kind": KIND_OF_FINETUNING.get(str(settings.get("is_finetune")).lower()),
        "model": settings.get("model_preset"),
        "data": settings.get("train_file"),
        "objective": settings.get("objective"),
        "max_steps": settings.get("max_steps"),
    }


def _learns(facts: Record) -> str:
    """What a run learns: text, answers, preferences, or empty as long as its rows have not been looked at."""
    kind = facts.get("kind", "pretrain")
    objective = facts.get("objective", "" if "data" in facts else "span")  # The sample is text.
    return LEARNS.get(kind) or {"pairs": "answers", "": ""}.get(objective, "text")


def _is_asked_anew(beat: Record, launch: Record) -> bool:
    """Whether a run was asked for after what its sign of life says."""
    return bool(launch) and launch.get("asked", 0.0) > beat.get("started", 0.0)


def _state(logs: Path, beat: Record, launch: Record, latest: LatestEvents, now: float) -> tuple[str, str]:
    """The state of a run, and why it is so."""
    if _is_asked_anew(beat, launch):
        return _launched_state(logs, launch)
    if not beat:
        if latest["failed"]:
            return "failed", str(latest["failed"]["reason"])
        return "done" if latest["end"] else "stopped", ""
    state = str(beat["state"])
    if state in ALIVE:
        process = process_state(beat)
        if abs(now - beat["time"]) > SILENT_SECONDS:
            return "paused" if process == "alive" else "died", ""
        if process == "ended":
            return "died", ""
    return state, str(beat.get("reason", ""))


def _launched_state(logs: Path, launch: Record) -> tuple[str, str]:
    """The state of a run of which nothing but the launch is known."""
    if launch.get("process") is None:
        if launch.get("refused"):
            return "failed", str(launch["refused"])
        return "waiting", str(launch.get("why", ""))
    match launch.get("exit_code"):
        case None if process_state(launch) == "alive":
            return "starting", ""
        case 0:
            return "done", ""
        case 130:
            return "stopped", end_of_file(logs / CONSOLE_FILE, CONSOLE_BYTES)
    return "failed", end_of_file(logs / CONSOLE_FILE, CONSOLE_BYTES)


def process_state(record: Record) -> str:
    """Whether the process that has written a record is `alive`, has `ended` (a zombie), or is `gone`, which is all that
    is known of other machines.

    A process that began after the record was written has taken the number of another, as after a restart of the
    machine.
    """
    number = record.get("process")
    if record.get("host") != platform.node() or type(number) is not int:
        return "gone"
    try:
        process = psutil.Process(number)
        if process.status() in ENDED:
            return "ended"
        written: Any = record.get("time", record.get("begun", record.get("started", math.inf)))
        is_older = process.create_time() <= written + CLOCK_SLACK_SECONDS
        return "alive" if is_older and "python" in " ".join(process.cmdline()) else "gone"
    except psutil.AccessDenied:  # Somebody else's, which may be a run.
        return "alive"
    except (psutil.Error, OverflowError, TypeError, ValueError):
        return "gone"


def _best(saved: Path, metric: str, evaluations: list[Record]) -> Record:
    """The best evaluation by the metric that decides: the one of the last checkpoint, or a later one."""
    saved_best = read_record(saved / "checkpoints" / "latest" / "state" / "training.json").get("best_metric") or {}
    scores = [(number_of(event.get(metric)), event.get("step")) for event in evaluations]
    if saved_best.get("metric") == metric:
        scores.insert(0, (number_of(saved_best.get("value")), saved_best.get("step")))
    sign = 1 if metric.rpartition("/")[2] in LESS_IS_BETTER else -1
    numbers = [(sign * score, score, step) for score, step in scores if score is not None]
    _, score, step = min(numbers, key=lambda one: one[0], default=(0, None, None))
    return {"metric": metric, "best_score": score, "best_step": step}


def end_of_file(path: Path, most_bytes: int) -> str:
    """The last whole lines of a text that somebody may be writing; empty where there is none."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most_bytes)
            file.seek(start)
            text = file.read().decode("utf8", "replace")
    except OSError:
        return ""
    return (text.partition("\n")[2] if start else text).strip()


def size_of(folders: Folders, name: str) -> int:
    """What a run takes on the disk in bytes, model and checkpoints and logs."""
    return folder_bytes(folders.log_dir / name) + folder_bytes(folders.output_dir / name)


def delete_run(folders: Folders, name: str) -> str:
    """Remove a run with its model, checkpoints and metrics.

    Returns:
        why that may not be, empty if it was done.
    """
    if run_facts(folders, name)["state"] in ALIVE:
        return say("{run} is still active; stop it first", run=name)
    logs, saved = folders.both(name)
    owner = read_record(saved / OWNER_FILE)
    if process_state(owner) == "alive":  # Its logs may lie elsewhere.
        return say("process {number} trains {run}; stop it first", number=owner["process"], run=name)
    for folder in (logs, saved):
        remove(folder)
    return ""
