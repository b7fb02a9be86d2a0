"""Everything behind the page's addresses, without HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import childproc
from board.form import OWN, command_line
from board.history import History
from board.launching import Launcher
from board.places import Outside, Places, checked_name, is_run_name
from board.planning import Planner, still_to_take
from board.runs import console_tail, list_runs, run_facts
from board.talking import Talks
from language import say
from run_files import HEARTBEAT_FILE, LAUNCH_FILE, METRICS_FILE, RUN_FILE, read_record
from settings.errors import UserError, reason_of
from settings.fields import AUTO, is_encodable
from settings.loading import load

KEPT_HISTORIES, READ_BYTES = 32, 2**21
LOG_BYTES, LONGEST_VALUE, MOST_FLAGS = 60_000, 4000, 150
PREVIEW_SECONDS, PREVIEW_BYTES, MOST_COMPARED = 60.0, 1024**3, 8
MODEL_FILES = ("model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json")


@dataclass
class Board:
    """The state of one page process: nothing that files do not tell, but what was read of them.

    Args:
        folder: where relative paths begin, as they do for a command typed there.
    """

    places: Places
    folder: Path
    planner: Planner = field(init=False)
    launcher: Launcher = field(init=False)
    talks: Talks = field(init=False)
    _histories: OrderedDict[str, History] = field(default_factory=OrderedDict)
    # held while the histories are looked through: requests and streams come in threads
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.planner = Planner(self.folder)
        self.launcher = Launcher(self.places, self.planner, self.folder)
        self.talks = Talks(self.places, self.folder)

    # --- runs ---

    def overview(self) -> dict[str, Any]:
        """All runs that can be opened here, and what this machine has; the others take memory as well."""
        runs = list_runs(self.places)
        shown = [run for run in runs if is_run_name(run["name"])]
        return {"runs": shown, "machine": machine_memory(), "still_to_take": still_to_take(runs)}

    def history(self, name: str) -> History:
        """What a run has told, as far as it was read; the least used ones are forgotten, and begin anew."""
        path = self.places.logs(name) / METRICS_FILE
        with self._lock:
            found = self._histories.setdefault(name, History(path))
            self._histories.move_to_end(name)
            while len(self._histories) > KEPT_HISTORIES:
                self._histories.popitem(last=False)
        return found

    def _read(self, name: str) -> History:
        """The same, read to its end."""
        history = self.history(name)
        history.refresh()
        return history

    def is_known(self, name: str) -> bool:
        """Whether there is a run of this name."""
        return checked_name(name) in self.places.names()

    def window(self, name: str, first: int, last: int) -> dict[str, object]:
        """The steps of a run from `first` to `last` alone, on a finer grid."""
        return self._read(name).window(first, last)

    def details(self, name: str, history: History | None = None) -> dict[str, Any]:
        """How a run stands, and all that is not drawn.

        Args:
            history: of the run, as somebody keeps it who reads on in it; None: it is read to its end.
        """
        history = self._read(name) if history is None else history
        launch = read_record(self.places.logs(name) / LAUNCH_FILE)
        facts = run_facts(self.places, name)
        given = launch.get("flags") if isinstance(launch.get("flags"), dict) else None
        command = command_line(str(launch.get("command", "train")), given) if given else None
        with history.lock:
            plan = {key: value for key, value in history.first_plan.items() if key not in ("phase_parts", "event")}
            return {
                **facts, "command": command, "settings": history.settings, "plan": plan, "end": history.end,
                "planned_parts": plan.get("components", {}), "phase_peaks": dict(history.phase_peaks),
                "best_eval": history.best_eval, "last_eval": history.last_eval, "train_rows": history.train_rows, "cleanups": list(history.cleanups),
                "saves": list(history.saves), "notes": list(history.notes), "samples": list(history.samples),
            }  # fmt: skip

    def log(self, name: str) -> str:
        """The last lines of a run's log; of one that has none yet, what it printed."""
        told = str(read_record(self.places.logs(name) / HEARTBEAT_FILE).get("log", ""))
        path = self.places.log_dir / Path(told).name
        if not told or not path.is_file() or path.is_symlink() or path.suffix != ".log":
            return console_tail(self.places.logs(name), LOG_BYTES)
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode("utf8", "replace")
        return text.partition("\n")[2] if size > LOG_BYTES else text

    def compare(self, names: list[str]) -> dict[str, Any]:
        """What is drawn of several runs, and their settings as far as they differ: name -> values in the order of the runs."""
        found, settings = {}, []
        for name in names[:MOST_COMPARED]:
            history = self._read(checked_name(name))
            with history.lock:
                found[name] = history.grid.drawn()
                settings.append(history.settings)
        keys = {key: None for one in settings for key in one if key not in (*OWN, "run_name")}
        values = {key: [one.get(key) for one in settings] for key in keys}
        differ = {key: each for key, each in values.items() if any(value != each[0] for value in each)}
        return {"runs": found, "differ": differ}

    # --- new runs ---

    def settled(self, flags: Mapping[str, Any]) -> dict[str, str]:
        """Flags as they came from a browser, with names of files turned into paths.

        Raises:
            UserError: a flag is not one that the page sets. Outside: a path leads elsewhere.
        """
        if len(flags) > MOST_FLAGS:
            raise UserError(say("too many settings"))
        settled: dict[str, str] = {}
        for name, value in flags.items():
            text = value if isinstance(value, str) else json.dumps(value)
            if name in OWN or len(text) > LONGEST_VALUE:
                raise UserError(say("--{flag} is not available on the page; use the command line", flag=name))
            if name in ("train_file", "validation_file") and text:
                settled[name] = self._typed(self.places.data(text))
            elif name in ("finetune_from", "tokenizer_dir") and text not in ("", "auto"):
                settled[name] = self._typed(self.places.model(text))
            elif text != "" and name != "run_name":
                settled[name] = text
        return settled

    def _typed(self, path: Path) -> str:
        """A path as one would type it here."""
        return str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else str(path)

    async def plan(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Whether a run would fit beside those that live, and the command for it."""
        try:
            flags = self.settled(raw)
            load("train", flags)
        except (UserError, Outside) as error:
            return {"problems": getattr(error, "problems", [reason_of(error)]), "exit_code": 2}
        runs = await asyncio.to_thread(list_runs, self.places)
        found = await self.planner.plan(flags, still_to_take(runs))
        given = str(raw.get("run_name") or "").strip()
        shown = {**flags, **({"run_name": given} if given else {})}
        return {**found, "command": command_line("train", shown), "machine_memory": machine_memory()}

    def start(self, raw: Mapping[str, Any]) -> str:
        """Put a new run into the queue. Returns its name."""
        flags, given = self.settled(raw), str(raw.get("run_name") or "").strip()
        if given.lower() in ("", AUTO):
            kind = "finetune" if str(raw.get("is_finetune", "")).lower() == "true" else "pretrain"
            return self.launcher.ask_anew(f"{kind}_{time.strftime('%Y%m%d_%H%M%S')}", "train", flags)
        self.launcher.ask(checked_name(given), "train", flags)
        return given

    def resume(self, name: str, max_steps: int | None = None) -> None:
        """Let a run go on from its last checkpoint, further than it was meant to where `max_steps` says so."""
        more = {} if max_steps is None else {"max_steps": str(max_steps)}
        self.launcher.ask(checked_name(name), "train", {"is_keep_training": "True", **more})

    # --- data and models ---

    async def preview(self, relative: str) -> dict[str, Any]:
        """Columns, first rows and lengths of a data file, read by a child process."""
        path = self.places.data(relative)
        limits: dict[str, Any] = {"max_bytes": PREVIEW_BYTES, "max_cpu": PREVIEW_SECONDS, "patience": 1.0}
        reading = partial(childproc.call, "data.sources.peek:preview", str(path), is_quiet=True, **limits)
        try:
            found: dict[str, Any] = await asyncio.to_thread(reading)
            return found
        except UserError as error:
            return {"problems": error.problems}
        except childproc.ChildDied:
            return {"problems": [say("{file} is not readable as rows", file=relative)]}

    def models(self) -> list[dict[str, Any]]:
        """Trained models: those of runs, and of their checkpoints; the newest first."""
        found = []
        if not self.places.output_dir.is_dir():
            return []
        for run in self.places.output_dir.iterdir():
            for folder in (run, *sorted(run.glob("checkpoints/step_*"), reverse=True)):
                weights = next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)
                if weights is not None and not run.name.startswith(".") and is_encodable(run.name):
                    relative = folder.relative_to(self.places.output_dir).as_posix()
                    facts = weights.stat()
                    found.append({
                        "name": relative, "run": run.name, "kind": read_record(run / RUN_FILE).get("kind"), "time": facts.st_mtime, "bytes": facts.st_size,
                        "is_checkpoint": folder is not run, "is_adapter": weights.name.startswith("adapter"),
                    })  # fmt: skip
        return sorted(found, key=lambda model: (model["is_checkpoint"], -model["time"]))

    def free_disk_bytes(self) -> int:
        """What the disk of the data folder has left."""
        self.places.data_dir.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.places.data_dir).free


def machine_memory() -> dict[str, int]:
    """RAM of this machine and what of it is free, in bytes."""
    memory = psutil.virtual_memory()
    return {"total_bytes": memory.total, "free_bytes": memory.available}
