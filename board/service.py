"""Everything behind the page's addresses, without HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from board.form import OWN, command_line
from board.launching import Launcher
from board.planning import Planner, still_to_take
from board.reader import Folders, History, Outside, checked_name, is_run_name
from board.runs import CONSOLE_FILE, end_of_file, list_runs, run_facts
from board.talking import Talks
from settings.errors import UserError, reason_of
from settings.fields import AUTO, is_encodable
from settings.loading import load
from support import child_process
from support.language import say
from training.report.run_files import HEARTBEAT_FILE, LAUNCH_FILE, METRICS_FILE, RUN_FILE, number_of, read_record

KEPT_HISTORIES = 32
READ_BYTES = 2**21
LOG_BYTES = 60_000
LONGEST_VALUE = 4000
MOST_FLAGS = 150
MOST_COMPARED = 8
PREVIEW_LIMITS = {"max_bytes": 1024**3, "max_cpu": 60.0, "patience": 1.0}
MODEL_FILES = ("model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json")


class Board:
    """The state of one page process: nothing that files do not tell, but what was read of them.

    Args:
        folder: where relative paths begin, as they do for a command typed there.
    """

    history: Callable[[str], History]

    def __init__(self, folders: Folders, folder: Path) -> None:
        self.folders = folders
        self.folder = folder
        self.planner = Planner(folder)
        self.launcher = Launcher(folders, self.planner, folder)
        self.talks = Talks(folders, folder)
        # The events of runs as far as they were read; the least used ones are forgotten, and read again.
        self.history = lru_cache(KEPT_HISTORIES)(lambda name: History(folders.logs(name) / METRICS_FILE))

    # --- runs ---

    def overview(self) -> dict[str, Any]:
        """All runs that can be opened here, and what this machine has; the others take memory as well."""
        runs = list_runs(self.folders)
        listed = [run for run in runs if is_run_name(run["name"])]
        return {"runs": listed, "machine": machine_memory(), "still_to_take": still_to_take(runs)}

    def is_known(self, name: str) -> bool:
        """Whether there is a run of this name."""
        return checked_name(name) in self.folders.names()

    def window(self, name: str, first: int, last: int) -> dict[str, object]:
        """The steps of a run from `first` to `last` alone, on a finer grid."""
        history = self.history(name)
        history.refresh()
        return history.window(first, last)

    def details(self, name: str, history: History) -> dict[str, Any]:
        """How a run stands, and all that is not drawn.

        Args:
            history: of the run, as somebody keeps it who reads on in it.
        """
        launch = read_record(self.folders.logs(name) / LAUNCH_FILE)
        flags = launch.get("flags")
        command = None
        if isinstance(flags, dict):
            command = command_line(str(launch.get("command", "train")), flags)
        facts = run_facts(self.folders, name)
        with history.lock:
            plan = {key: value for key, value in history.latest["plan"].items() if key not in ("phase_parts", "event")}
            return {
                **facts,
                "command": command,
                "settings": history.settings(),
                "plan": plan,
                "planned_parts": plan.get("components", {}),
                "end": history.latest["end"],
                "phase_peaks": dict(history.phase_peaks),
                "train_rows": number_of(history.latest["start"].get("train_rows")) or 0,
                "cleanups": list(history.cleanups),
                "saves": list(history.saves),
                "notes": list(history.notes),
                "samples": list(history.samples),
            }

    def log(self, name: str) -> str:
        """The last lines of a run's log; of one that has none yet, what it printed."""
        logs = self.folders.logs(name)
        log = str(read_record(logs / HEARTBEAT_FILE).get("log", ""))
        path = self.folders.log_dir / Path(log).name
        if path.suffix != ".log" or path.is_symlink() or not path.is_file():
            path = logs / CONSOLE_FILE
        return end_of_file(path, LOG_BYTES)

    def compare(self, names: list[str]) -> dict[str, Any]:
        """What is drawn of several runs, and their settings as far as they differ: name -> values in the order of the
        runs.
        """
        drawn = {}
        settings = []
        for name in names[:MOST_COMPARED]:
            history = self.history(name)
            history.refresh()
            with history.lock:
                drawn[name] = history.grid.drawn()
                settings.append(history.settings())
        keys = dict.fromkeys(key for one in settings for key in one if key not in (*OWN, "run_name"))
        values = {key: [one.get(key) for one in settings] for key in keys}
        differing = {key: each for key, each in values.items() if each != each[:1] * len(each)}
        return {"runs": drawn, "differ": differing}

    # --- new runs ---

    def settled(self, flags: Mapping[str, Any]) -> dict[str, str]:
        """Flags as they came from a browser, with names of files turned into paths.

        Raises:
            UserError: a flag is not one that the page sets. Outside: a path leads elsewhere.
        """
        if len(flags) > MOST_FLAGS:
            raise UserError(say("too many settings"))
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in flags.items()}
        for name, text in texts.items():
            if name in OWN or len(text) > LONGEST_VALUE:
                raise UserError(say("--{flag} is not available on the page; use the command line", flag=name))
        settled = {name: text for name, text in texts.items() if text and name != "run_name"}
        for name in settled.keys() & {"train_file", "validation_file"}:
            settled[name] = self._typed(self.folders.data(settled[name]))
        for name in settled.keys() & {"finetune_from", "tokenizer_dir"}:
            if settled[name] != AUTO:
                settled[name] = self._typed(self.folders.model(settled[name]))
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
        runs = await asyncio.to_thread(list_runs, self.folders)
        plan = await self.planner.plan(flags, still_to_take(runs))
        name = _name_of(raw)
        if name:
            flags["run_name"] = name
        return {**plan, "command": command_line("train", flags), "machine_memory": machine_memory()}

    def start(self, raw: Mapping[str, Any]) -> str:
        """Put a new run into the queue. Returns its name."""
        flags = self.settled(raw)
        name = _name_of(raw)
        if name.lower() in ("", AUTO):
            kind = "finetune" if str(raw.get("is_finetune", "")).lower() == "true" else "pretrain"
            return self.launcher.enqueue_under_free_name(f"{kind}_{time.strftime('%Y%m%d_%H%M%S')}", "train", flags)
        self.launcher.enqueue(name, "train", flags)
        return name

    def resume(self, name: str, **more: str) -> None:
        """Let a run go on from its last checkpoint, with more settings such as `max_steps` where it is to go
        further.
        """
        self.launcher.enqueue(name, "train", {"is_keep_training": "True", **more})

    # --- data and models ---

    def preview(self, relative: str) -> dict[str, Any]:
        """Columns, first rows and lengths of a data file, read by a child process."""
        path = str(self.folders.data(relative))
        try:
            preview: dict[str, Any] = child_process.call(
                "data.sources.peek:preview", path, is_quiet=True, **PREVIEW_LIMITS
            )
            return preview
        except UserError as error:
            return {"problems": error.problems}
        except child_process.ChildDied:
            return {"problems": [say("{file} is not readable as rows", file=relative)]}

    def models(self) -> list[dict[str, Any]]:
        """Trained models: those of runs, and of their checkpoints; the newest first."""
        output_dir = self.folders.output_dir
        weights = {
            file.parent: file
            for pattern in ("*", "*/checkpoints/step_*")
            for name in MODEL_FILES
            for file in output_dir.glob(f"{pattern}/{name}")
        }
        models = []
        for folder, file in weights.items():
            name = folder.relative_to(output_dir)
            run = name.parts[0]
            if not run.startswith(".") and is_encodable(run):
                models.append(
                    {
                        "name": name.as_posix(),
                        "run": run,
                        "kind": read_record(output_dir / run / RUN_FILE).get("kind"),
                        "time": file.stat().st_mtime,
                        "bytes": file.stat().st_size,
                        "is_checkpoint": len(name.parts) > 1,
                        "is_adapter": file.name.startswith("adapter"),
                    }
                )
        return sorted(models, key=lambda model: (model["is_checkpoint"], -model["time"]))

    def free_disk_bytes(self) -> int:
        """What the disk of the data folder has left."""
        self.folders.data_dir.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.folders.data_dir).free


def _name_of(raw: Mapping[str, Any]) -> str:
    """The name that the browser gives a new run; empty: none."""
    return str(raw.get("run_name") or "").strip()


def machine_memory() -> dict[str, int]:
    """RAM of this machine and what of it is free, in bytes."""
    memory = psutil.virtual_memory()
    return {"total_bytes": memory.total, "free_bytes": memory.available}
