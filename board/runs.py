"""Which runs are there, and how do they stand? Told from their files alone, for the page and for the terminal.

A run is a folder of `log_dir` with a `metrics.jsonl`, `launch.json` or `heartbeat.json`, or one of `output_dir` with a `run.json`.
Only the beginning and the end of a file of metrics are read here: a list of runs costs the same at any length.

| state | how it is known |
|---|---|
| waiting | asked for, and in the queue until there is memory |
| starting | its process lives and has not come to its first step: data and tokenizer are prepared, the plan is made |
| running | its sign of life is younger than 30 s |
| paused | older, and its process is still there: the machine slept, or the process was halted |
| done, stopped, failed | its last sign of life says so |
| died | no sign of life for 30 s, and no process |

A sign of life that lies ahead by more than 30 s counts as an old one: the clock was set back since, or is another machine's.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from board.history import METRICS_FILE
from board.places import Places, plain_json, read_json
from storage import open_plain

HEARTBEAT_FILE, REQUEST_FILE, LAUNCH_FILE, RUN_FILE = "heartbeat.json", "request", "launch.json", "run.json"
OWNER_FILE = "owner.json"
SIGNS = (METRICS_FILE, LAUNCH_FILE, HEARTBEAT_FILE)
SILENT_SECONDS = 30.0
CLOCK_SLACK_SECONDS = 120.0  # by which a clock may be set between a process's beginning and its word
HEAD_BYTES, TAIL_BYTES = 2**16, 2**15
ALIVE = ("starting", "running", "paused")
HEARING = ("starting", "running")  # where a wish is heard soon
UNTIMED_STEPS, TIMED_STEPS = 3, 60
CLOCK_GRAIN = 0.05  # seconds; times are told in hundredths
SLOWEST, PAUSE_SECONDS = 10.0, 60.0  # between two steps with nothing in between: more is no work


def run_names(places: Places) -> list[str]:
    """Names of all runs."""
    found = {path.parent.name for file in SIGNS for path in places.log_dir.glob(f"*/{file}")}
    found |= {path.parent.name for path in places.output_dir.glob(f"*/{RUN_FILE}")}
    return sorted(name for name in found if not name.startswith("."))


def list_runs(places: Places, now: float | None = None) -> list[dict[str, Any]]:
    """How each run stands, the newest first."""
    runs = [run_facts(places, name, now) for name in run_names(places)]
    return sorted(runs, key=lambda run: (run["state"] not in (*ALIVE, "waiting"), -run["started"]))


def run_facts(places: Places, name: str, now: float | None = None) -> dict[str, Any]:
    """How one run stands.

    Args:
        now: seconds since 1970; the clock unless a test says otherwise.
    """
    now = time.time() if now is None else now
    folder = places.log_dir / name
    beat, launch = read_json(folder / HEARTBEAT_FILE), read_json(folder / LAUNCH_FILE)
    record = read_json(places.output_dir / name / RUN_FILE)
    told = _head(folder / METRICS_FILE), list(_tail(folder / METRICS_FILE))
    try:
        return _facts(places, name, now, beat, launch, record, *told)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):  # somebody else has written them
        known = _facts(places, name, now, {}, {}, {}, {}, [])
        return {**known, "state": "failed", "reason": "its files hold what no run writes"}


def _facts(
    places: Places, name: str, now: float, beat: dict[str, Any], launch: dict[str, Any], record: dict[str, Any],
    first: dict[str, dict[str, Any]], last: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """The same, of what its files say: sign of life, launch, record, and the events at the beginning and at the end."""
    folder = places.log_dir / name
    by_kind = {event.get("event"): event for event in last}
    settings = (by_kind.get("start") or first.get("start") or {}).get("settings") or _asked(launch)
    plan, end = by_kind.get("plan") or first.get("plan") or {}, by_kind.get("end") or {}
    if (
        "end" in by_kind
        and "start" in by_kind
        and [e["event"] for e in last if e.get("event") in ("start", "end")][-1] == "start"
    ):
        end = {}  # of the part before: the run goes on
    state, reason = _state(folder, places.output_dir / name, beat, launch, bool(end), now)
    kind = record.get("kind") or beat.get("kind") or ("finetune" if settings.get("is_finetune") else "pretrain")
    data = settings.get("train_file") or beat.get("data")
    objectives = (record.get("objective"), settings.get("objective"), beat.get("objective"))
    steps = [event for event in last if event.get("event") == "step"]
    step = int(steps[-1]["step"]) if steps else int(end.get("step") or 0)
    most = beat.get("max_steps") or settings.get("max_steps")
    most = int(most) if isinstance(most, (int, float)) else None
    losses = [event["loss"] for event in steps if isinstance(event.get("loss"), (int, float))]
    left = _seconds_left(last, most) if state == "running" else None
    return {
        "name": name, "state": state, "reason": reason,
        "kind": kind, "learns": _learns(kind, [str(told) for told in objectives if told], bool(data)),
        "model": settings.get("model_preset") or beat.get("model"),
        "data": data,
        "started": _started(launch, record, beat, folder), "ended": end.get("time") or beat.get("time"),
        "step": step, "max_steps": most, "loss": losses[-1] if losses else None,
        "loss_is_number": not steps or bool(isinstance(steps[-1].get("loss"), (int, float))),
        "eval_loss": (by_kind.get("eval") or {}).get("loss"), "best_eval_loss": end.get("best_eval_loss"),
        "learning_rate": steps[-1].get("learning_rate") if steps else None,
        "tokens_per_second": _speed(steps[-TIMED_STEPS:]),
        "phase": beat.get("phase") if state in ALIVE else None,
        "doing": beat.get("doing") if state == "starting" and isinstance(beat.get("doing"), dict) else {},
        "process": beat.get("process") or launch.get("process") if state in ALIVE else None,
        "memory_bytes": beat.get("anon_bytes") if state in ALIVE else None,
        "peak_bytes": end.get("measured_peak_bytes") or beat.get("peak_bytes") or (by_kind.get("memory") or {}).get("peak_bytes"),
        "budget_bytes": end.get("budget_bytes") or plan.get("budget_bytes") or beat.get("budget_bytes"),
        "planned_peak_bytes": plan.get("peak_bytes") or launch.get("planned_peak_bytes"),
        "seconds_left": left, "ends": None if left is None else now + left,
        "has_checkpoint": (places.output_dir / name / "checkpoints").is_dir(),
        "hears": state in HEARING and (beat.get("started") or 0.0) >= (launch.get("asked") or 0.0),
    }  # fmt: skip


def _asked(launch: dict[str, Any]) -> dict[str, Any]:
    """Settings that were asked for on the page, of a run that has told none yet."""
    flags = launch.get("flags")
    known = flags if isinstance(flags, dict) else {}
    told = {
        name: known[name] for name in ("model_preset", "train_file", "objective") if isinstance(known.get(name), str)
    }
    return {**told, "is_finetune": str(known.get("is_finetune")).lower() == "true"}


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


def _state(
    folder: Path, saved: Path, beat: dict[str, Any], launch: dict[str, Any], has_ended: bool, now: float
) -> tuple[str, str]:
    asked = launch.get("asked") or 0.0
    if launch and asked > (beat.get("started") or 0.0):  # newer than what the run's own files tell of
        return _state_of_launch(folder, launch)
    if beat:
        state, reason = str(beat.get("state")), str(beat.get("reason") or "")
        if state not in ALIVE:
            return state, reason
        if _is_fresh(float(beat.get("time") or 0.0), now):
            return state, reason
        return ("paused" if _lives_here(beat) else "died"), ""
    if has_ended:
        return "done", ""
    try:
        told = (folder / METRICS_FILE).stat().st_mtime
    except OSError:
        return "died" if (saved / OWNER_FILE).exists() else "stopped", ""
    if _is_fresh(told, now):
        return "running", ""
    return ("died" if (saved / OWNER_FILE).exists() else "stopped"), ""


def _is_fresh(moment: float, now: float) -> bool:
    """Whether something was told just now; a time that is still to come is none of this clock, and says nothing."""
    return abs(now - moment) <= SILENT_SECONDS


def _state_of_launch(folder: Path, launch: dict[str, Any]) -> tuple[str, str]:
    if launch.get("process") is None:
        return ("failed" if launch.get("refused") else "waiting"), str(launch.get("refused") or launch.get("why") or "")
    if launch.get("exit_code") is None and _lives_here(launch):
        return "starting", ""
    if launch.get("exit_code") == 0:
        return "done", ""
    return ("stopped" if launch.get("exit_code") == 130 else "failed"), console_tail(folder)


def _lives_here(record: dict[str, Any]) -> bool:
    """Whether the process of a record still is: on this machine, and no younger than its last word."""
    number = record.get("process")
    if record.get("host") != platform.node() or type(number) is not int or number <= 0:
        return False
    last_word = record.get("time") or record.get("begun") or record.get("started")
    return is_alive(number) and not _is_younger(number, last_word)


def _is_younger(number: int, moment: object) -> bool:
    """Whether a process began after a moment: then it has taken the number of another, as after a restart of the machine."""
    if not isinstance(moment, (int, float)):
        return False
    began = _began(number)
    return began is not None and began > moment + CLOCK_SLACK_SECONDS


def _began(number: int) -> float | None:
    """When a process began, in seconds since 1970; None: the system does not say."""
    try:
        ticks = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19])
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        return float(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def is_alive(number: int) -> bool:
    """Whether a process of this program has this number; one that has ended and waits to be counted has not."""
    if os.name == "nt":  # where a signal 0 is a Ctrl-C
        kernel = getattr(ctypes, "windll").kernel32  # noqa: B009
        handle, code = kernel.OpenProcess(0x1000, False, number), ctypes.c_ulong()
        try:
            return bool(kernel.GetExitCodeProcess(handle, ctypes.byref(code))) and code.value == 259  # which still runs
        finally:
            kernel.CloseHandle(handle)  # while it is held the number is not given back
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        status = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        words = Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return True  # no /proc here
    return status[:1] != ["Z"] and b"python" in words


def console_tail(folder: Path, most: int = 3000) -> str:
    """The last of what a run printed: why it was refused."""
    try:
        with (folder / "console.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read().decode("utf8", "replace").strip()
    except OSError:
        return ""


def _head(path: Path) -> dict[str, dict[str, Any]]:
    """The first event of each kind at the beginning of a file."""
    found: dict[str, dict[str, Any]] = {}
    try:
        with open_plain(path) as file:
            content = file.read(HEAD_BYTES)
    except OSError:
        return found
    for event in _events(content.split(b"\n")[:-1]):
        if event["event"] == "step":
            break
        found.setdefault(event["event"], event)
    return found


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """The events at the end of a file."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            content = file.read()
    except OSError:
        return
    lines = content.split(b"\n")
    yield from _events(lines[1 if size > TAIL_BYTES else 0 : -1])


def _events(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = plain_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str) and isinstance(event.get("step", 0), int):
            yield event


def _seconds_left(events: list[dict[str, Any]], most: int | None) -> float | None:
    """How long the rest takes, from the last steps; by the clock where it was told, so that evaluations count."""
    taken = list(_taken(events))[-TIMED_STEPS:]
    if most is None or not taken:
        return None
    steps, seconds = (sum(parts) for parts in zip(*taken, strict=True))
    last = next(event["step"] for event in reversed(events) if event["event"] == "step")
    return float(max(0.0, (most - last) * seconds / steps))


def _taken(events: list[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """From each step to the next: how many steps that is, and what it took.

    A clock that was set in between, or a machine that slept, is known by what the steps say of themselves; from one part of a
    run to the next nothing is counted.
    """
    before: dict[str, Any] | None = None
    has_worked = False  # an evaluation or a checkpoint may take long
    for event in events:
        if event["event"] == "start":
            before = None
        if event["event"] != "step":
            has_worked = True
            continue
        if before is not None and before["step"] < event["step"]:
            steps = event["step"] - before["step"]
            own = steps * (_number(event.get("seconds")) or 0.0)
            yield steps, _by_clock(_number(before.get("time")), _number(event.get("time")), own, has_worked)
        before, has_worked = (event if event["step"] > UNTIMED_STEPS else None), False


def _by_clock(before: float | None, after: float | None, own: float, has_worked: bool) -> float:
    """What lies between two times of the clock, unless it must have been set in between: then `own`, the steps' seconds."""
    if before is None or after is None:
        return own
    is_set_back = after - before < own / 2 - CLOCK_GRAIN
    is_set_ahead = not has_worked and after - before > SLOWEST * own + PAUSE_SECONDS
    return own if is_set_back or is_set_ahead else after - before


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _speed(steps: list[dict[str, Any]]) -> float | None:
    """Tokens a second of the last steps together; one alone says little on a busy machine."""
    told = [(event.get("tokens"), event.get("seconds")) for event in steps]
    known = [(tokens, seconds) for tokens, seconds in told if isinstance(tokens, int) and isinstance(seconds, float)]
    taken = sum(seconds for _, seconds in known)
    return sum(tokens for tokens, _ in known) / taken if taken > 0 else None


def folder_bytes(folder: Path) -> int:
    """What a folder takes on the disk; files that hard links share count once."""
    seen: dict[tuple[int, int], int] = {}
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                facts = os.lstat(os.path.join(root, name))
            except OSError:
                continue
            seen[(facts.st_dev, facts.st_ino)] = facts.st_size
    return sum(seen.values())


def size_of(places: Places, name: str) -> int:
    """What a run takes on the disk, model and checkpoints and logs."""
    return folder_bytes(places.log_dir / name) + folder_bytes(places.output_dir / name)


def delete_run(places: Places, name: str) -> str:
    """Remove a run with its model, checkpoints and metrics.

    Returns:
        why that may not be, empty if it was done.
    """
    state = run_facts(places, name)["state"]
    if state in ALIVE:
        return f"{name} is {state}; stop it first"
    logs, saved = places.both(name)
    owner = read_json(saved / OWNER_FILE)
    if _lives_here(owner):  # its logs may lie elsewhere
        return f"process {owner['process']} trains {name}; stop it first"
    for folder in (logs, saved):
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir():
            shutil.rmtree(folder)
    return ""
