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

A sign of life that lies ahead by more than 30 s counts as an old one: the clock was set back since, or is another machine's.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil

from board.history import deciding_metric, is_better
from board.places import Places
from language import say
from run_files import HEARTBEAT_FILE, LAUNCH_FILE, METRICS_FILE, OWNER_FILE, RUN_FILE, EventReader, read_record
from storage import folder_bytes, remove

SILENT_SECONDS = 30.0
CLOCK_SLACK_SECONDS = 120.0  # by which a clock may be set between a process's beginning and its word
HEAD_BYTES, TAIL_BYTES = 2**16, 2**15
ALIVE = ("starting", "running", "paused")
HEARING = ("starting", "running")  # where a wish is heard soon
TIMED_STEPS = 60
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # of processes whose parents have not asked how they ended


def list_runs(places: Places, now: float | None = None) -> list[dict[str, Any]]:
    """How each run stands, the newest first."""
    runs = [run_facts(places, name, now) for name in places.names()]
    return sorted(runs, key=lambda run: (run["state"] not in (*ALIVE, "waiting"), -run["started"]))


def run_facts(places: Places, name: str, now: float | None = None) -> dict[str, Any]:
    """How one run stands.

    Args:
        now: seconds since 1970; the clock unless a test says otherwise.
    """
    folder, saved, now = places.log_dir / name, places.output_dir / name, time.time() if now is None else now
    beat, launch = read_record(folder / HEARTBEAT_FILE), read_record(folder / LAUNCH_FILE)
    record = read_record(saved / RUN_FILE)
    try:
        latest, steps, evaluations = _told(folder / METRICS_FILE)
        facts = _facts(folder, saved, now, beat, launch, record, latest, steps)
        return {**facts, **_best(saved, latest, evaluations)}
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):  # somebody else has written them
        known = _facts(folder, saved, now, {}, {}, {}, {}, [])
        told = {"state": "failed", "reason": say("the files of this run are damaged")}
        return {**known, **told, "metric": "loss", "best_score": None, "best_step": None}


def _told(path: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """The last event of each kind at a file's end, `start` and `plan` also at its beginning; the last steps and evaluations."""
    latest, steps, evaluations = dict[str, dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    try:
        for event in EventReader(path).events(HEAD_BYTES):
            if event["event"] in ("start", "plan"):
                latest[event["event"]] = event
        for event in EventReader(path, max(0, path.stat().st_size - TAIL_BYTES)).events():
            latest[event["event"]] = event
            if event["event"] == "start":
                for ending in ("end", "failed"):  # of the part before: the run goes on
                    latest.pop(ending, None)
            if event["event"] == "step":
                steps.append(event)
            if event["event"] == "eval":
                evaluations.append(event)
    except OSError:
        pass
    return latest, steps, evaluations


def _best(saved: Path, latest: dict[str, dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """The best evaluation by the metric that decides: the one of the last checkpoint, or a later one."""
    metric = deciding_metric(latest.get("start", {}).get("settings") or {})
    kept = read_record(saved / "checkpoints" / "latest" / "state" / "training.json").get("best_metric")
    found: tuple[Any, Any] = (None, None)
    if isinstance(kept, dict) and kept.get("metric") == metric:
        found = kept.get("value"), kept.get("step")
    for event in [latest.get("end", {}).get("best_evaluation") or {}, *evaluations]:
        if is_better(metric, event.get(metric), found[0]):
            found = event[metric], event.get("step")
    return {"metric": metric, "best_score": found[0], "best_step": found[1]}


def _facts(
    folder: Path, saved: Path, now: float, beat: dict[str, Any], launch: dict[str, Any], record: dict[str, Any],
    latest: dict[str, dict[str, Any]], steps: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """The same, of what its files say: sign of life, launch, record, and events."""
    flags = launch.get("flags")
    asked = dict(flags, is_finetune=str(flags.get("is_finetune")).lower() == "true") if isinstance(flags, dict) else {}
    settings = latest.get("start", {}).get("settings") or {k: v for k, v in asked.items() if isinstance(v, (str, bool))}
    plan, end, last, failed = (latest.get(kind, {}) for kind in ("plan", "end", "step", "failed"))
    state, reason = _state(folder, beat, launch, bool(end), now)
    if failed and not beat and state == "stopped":
        state, reason = "failed", str(failed["reason"])
    kind = record.get("kind") or beat.get("kind") or ("finetune" if settings.get("is_finetune") else "pretrain")
    data = settings.get("train_file") or beat.get("data")
    objectives = (record.get("objective"), settings.get("objective"), beat.get("objective"))
    most = beat.get("max_steps") or settings.get("max_steps")
    losses = [event["loss"] for event in steps if isinstance(event.get("loss"), (int, float))]
    left = beat.get("seconds_left") if state == "running" else None
    timed = [event for event in steps[-TIMED_STEPS:] if event.get("tokens") and event.get("seconds")]
    return {
        "name": folder.name, "state": state, "reason": reason,
        "kind": kind, "learns": _learns(kind, [str(told) for told in objectives if told], bool(data)),
        "model": settings.get("model_preset") or beat.get("model"),
        "data": data,
        "started": _started(launch, record, beat, folder), "ended": end.get("time") or beat.get("time"),
        "step": last.get("step") or end.get("step") or 0,
        "max_steps": int(most) if isinstance(most, (int, float)) else None,
        "loss": losses[-1] if losses else None,
        "loss_is_number": not last or isinstance(last.get("loss"), (int, float)),
        "eval_loss": latest.get("eval", {}).get("loss"), "best_eval_loss": end.get("best_eval_loss"),
        "learning_rate": last.get("learning_rate"),
        "tokens_per_second": sum(e["tokens"] for e in timed) / sum(e["seconds"] for e in timed) if timed else None,
        "phase": beat.get("phase") if state in ALIVE else None,
        "doing": beat.get("doing") if state == "starting" and isinstance(beat.get("doing"), dict) else {},
        "process": beat.get("process") or launch.get("process") if state in ALIVE else None,
        "memory_bytes": beat.get("anon_bytes") if state in ALIVE else None,
        "peak_bytes": end.get("measured_peak_bytes") or beat.get("peak_bytes") or latest.get("memory", {}).get("peak_bytes"),
        "budget_bytes": end.get("budget_bytes") or plan.get("budget_bytes") or beat.get("budget_bytes"),
        "planned_peak_bytes": plan.get("peak_bytes") or launch.get("planned_peak_bytes"),
        "seconds_left": left, "ends": None if left is None else beat["time"] + left,
        "has_checkpoint": (saved / "checkpoints").is_dir(),
        "hears": state in HEARING and (beat.get("started") or 0.0) >= (launch.get("asked") or 0.0),
    }  # fmt: skip


def _learns(kind: str, objectives: list[str], has_data: bool) -> str:
    """What a run learns: text, answers, preferences, or empty as long as its rows have not been looked at.

    Args:
        objectives: as far as they are known, the surest first. has_data: whether it learns from other than the sample.
    """
    if kind != "pretrain":
        return "preferences" if kind == "dpo" else "answers"
    known = next((one for one in objectives if one != "auto"), "" if has_data else "span")
    return {"pairs": "answers", "": ""}.get(known, "text")


def _started(launch: dict[str, Any], record: dict[str, Any], beat: dict[str, Any], folder: Path) -> float:
    told = [record.get("resumed"), record.get("started"), launch.get("asked"), beat.get("started")]
    times = [float(moment) for moment in told if isinstance(moment, (int, float))]
    if times:
        return max(times)
    try:
        return (folder / METRICS_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _state(folder: Path, beat: dict[str, Any], launch: dict[str, Any], has_ended: bool, now: float) -> tuple[str, str]:
    """The state of a run, and why it is so."""
    # newer than what the run's own files say
    if launch and (launch.get("asked") or 0.0) > (beat.get("started") or 0.0):
        if launch.get("process") is None:
            reason = str(launch.get("refused") or launch.get("why") or "")
            return "failed" if launch.get("refused") else "waiting", reason
        if launch.get("exit_code") is None and _lives_here(launch):
            return "starting", ""
        if launch.get("exit_code") == 0:
            return "done", ""
        return "stopped" if launch.get("exit_code") == 130 else "failed", console_tail(folder)
    if not beat:
        return "done" if has_ended else "stopped", ""
    state, reason = str(beat.get("state")), str(beat.get("reason") or "")
    if state in ALIVE and abs(now - float(beat.get("time") or 0.0)) > SILENT_SECONDS:
        return "paused" if _lives_here(beat) else "died", ""
    if state in ALIVE and _is_zombie(beat):
        return "died", ""
    return state, reason


def _is_zombie(record: dict[str, Any]) -> bool:
    """Whether the process of a record is known to have ended: it waits for its parent, so that its number is not another's."""
    number = record.get("process")
    if record.get("host") != platform.node() or type(number) is not int or number <= 0:
        return False
    try:
        return bool(psutil.Process(number).status() in ENDED)
    except (psutil.Error, OverflowError):
        return False


def _lives_here(record: dict[str, Any]) -> bool:
    """Whether the process of a record still is: on this machine, and no younger than its last word."""
    number, last_word = record.get("process"), record.get("time") or record.get("begun") or record.get("started")
    if record.get("host") != platform.node() or type(number) is not int or number <= 0:
        return False
    return is_alive(number, last_word if isinstance(last_word, (int, float)) else time.time())


def is_alive(number: int, moment: float) -> bool:
    """Whether a process of Python has this number that was there at a moment, in seconds since 1970.

    One that began later has taken the number of another, as after a restart of the machine.
    """
    try:
        process = psutil.Process(number)
        is_ours = process.status() not in ENDED and "python" in " ".join(process.cmdline())
        return is_ours and process.create_time() <= moment + CLOCK_SLACK_SECONDS
    except psutil.AccessDenied:  # somebody else's, which may be a run
        return True
    except (psutil.Error, OverflowError):
        return False


def console_tail(folder: Path, most: int = 3000) -> str:
    """The last of what a run printed: why it was refused."""
    try:
        with (folder / "console.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read().decode("utf8", "replace").strip()
    except OSError:
        return ""


def size_of(places: Places, name: str) -> int:
    """What a run takes on the disk in bytes, model and checkpoints and logs."""
    return folder_bytes(places.log_dir / name) + folder_bytes(places.output_dir / name)


def delete_run(places: Places, name: str) -> str:
    """Remove a run with its model, checkpoints and metrics.

    Returns:
        why that may not be, empty if it was done.
    """
    state = run_facts(places, name)["state"]
    if state in ALIVE:
        return say("{run} is still active; stop it first", run=name)
    logs, saved = places.both(name)
    owner = read_record(saved / OWNER_FILE)
    if _lives_here(owner):  # its logs may lie elsewhere
        return say("process {number} trains {run}; stop it first", number=owner["process"], run=name)
    for folder in (logs, saved):
        remove(folder)
    return ""
