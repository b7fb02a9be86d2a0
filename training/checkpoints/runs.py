"""The folders of runs: making, replacing, resuming and publishing one, and finding the newest; `run.json` says what a
run is.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.formats.checksums import CHECKSUMS_FILE, damages, published_files, read_sums, write_sums
from settings.errors import UserError, reason_of, refuse
from settings.fields import AUTO
from settings.names import name_problem, shown_name
from settings.tasks import is_pretraining
from support.language import say
from support.storage import (
    TEMPORARY,
    atomic_file,
    atomic_folder,
    clear_leftovers,
    remove,
    replaced_by,
    restore_folder,
    write_text,
    writing,
)
from training.checkpoints.folder import Checkpoints
from training.processes.launch import launch_folder, restarts
from training.report.run_files import RUN_FILE, read_record, saved_runs

KINDS = ("pretrain", "finetune", "dpo")
MODEL_FILES = ("config.json", "model.safetensors")
ATTEMPT_FILE = "frugalt5_run.json"  # It lies in torchrun's folder for a launch.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def new_run_name(kind: str) -> str:
    """The name of a run that got none: kind and time, e.g. `pretrain_20250131_120000`."""
    return f"{kind}_{time.strftime('%Y%m%d_%H%M%S')}"


def check_name(name: str) -> list[str]:
    """Find why this can be no name of a run."""
    problem = name_problem(name)
    if not problem:
        return []
    return [say("--{name} = {value}, {problem}", name="run_name", value=shown_name(name), problem=problem)]


def check_new_run(output_dir: str | Path, name: str, overwrite: bool = False) -> list[str]:
    """Find what forbids a new run, creating nothing.

    Returns:
        problems, as `UserError` takes them; empty if all is well.
    """
    problems = [*check_name(name), *check_writable("output_dir", output_dir)]
    if problems:
        return problems
    run_dir = Path(output_dir) / name
    is_empty = run_dir.is_dir() and not run_dir.is_symlink() and not any(run_dir.iterdir())
    if is_empty or not os.path.lexists(run_dir):
        return []
    if not overwrite:
        text = (
            "--run_name = {run}, exists in {folder}; choose another name, resume it with --is_keep_training=True or "
            "replace it with --overwrite=True"
        )
        return [say(text, run=name, folder=output_dir)]
    if not (run_dir / RUN_FILE).is_file():
        text = "--run_name = {name}, {run_dir} is not a run of this program and is not replaced; choose another"
        return [say(text, name=name, run_dir=run_dir)]
    return []


def check_writable(flag: str, folder: str | Path) -> list[str]:
    """Find what keeps the folder that a flag names from being made or written, creating nothing."""
    nearest = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    obstacle = say("{nearest} is a file", nearest=nearest)
    if nearest.is_dir():
        if os.access(nearest, os.W_OK | os.X_OK):
            return []
        obstacle = say("{nearest} is not writable", nearest=nearest)
    text = "--{flag} = {folder}, cannot be written: {obstacle}; choose another folder"
    return [say(text, flag=flag, folder=folder, obstacle=obstacle)]


def create_run(
    output_dir: str | Path,
    name: str,
    kind: str,
    *,
    overwrite: bool = False,
    fill: Callable[[Path], object] = lambda folder: None,
    objective: str = "",
) -> Path:
    """Make the folder of a new run; it appears with all that it begins with, or not at all.

    Args:
        output_dir: folder of all runs; made if missing.
        kind: one of `KINDS`.
        overwrite: replace an existing run of that name; it lies beside until `delete_replaced_run`.
        fill: puts further files into the folder it is given.
        objective: what the run trains on, for those who use the model.
    Returns:
        the run's folder.
    Raises:
        UserError: the name exists or is not a folder name, or the folder cannot be written.
    """
    assert kind in KINDS
    run_dir = Path(output_dir) / name
    problems = check_new_run(output_dir, name, overwrite)
    if not problems and restore_replaced_run(run_dir):
        problems = check_new_run(output_dir, name, overwrite)
    refuse(problems)
    with writing("output_dir", output_dir), atomic_folder(run_dir, keeps_replaced=True) as folder:
        _write_record(
            folder,
            {
                "name": name,
                "kind": kind,
                "objective": objective,
                "started": time.time(),
                "order": _next_order(run_dir.parent),
            },
        )
        fill(folder)
    return run_dir


def delete_replaced_run(run_dir: Path) -> None:
    """Remove the run that a new one has replaced, once the new one's model is there."""
    with writing("output_dir", run_dir.parent):
        remove(replaced_by(run_dir))


def restore_replaced_run(run_dir: Path) -> bool:
    """Give the run that a new one has replaced its place again, if there is one: the new one ended before its model was
    there.
    """
    if not os.path.lexists(replaced_by(run_dir)):
        return False
    with suppress(OSError):  # The replaced run lies beside it, whole.
        remove(run_dir)
    return restore_folder(run_dir)


def resume_run(run_dir: str | Path) -> Path:
    """Note that a run continues, which makes it the newest one, and clear away what a killed process has left of it.

    Raises:
        UserError: it cannot be written.
    """
    run_dir = Path(run_dir)
    with writing("output_dir", run_dir.parent):
        clear_leftovers(run_dir)
        for path in run_dir.glob(f"{TEMPORARY}*"):
            remove(path)
        record = read_run(run_dir) or {}
        _write_record(run_dir, {**record, "resumed": time.time(), "order": _next_order(run_dir.parent)})
    return run_dir


def note_attempt(run_dir: Path) -> None:
    """Let the next attempt of this torchrun know which run this one has begun or continued."""
    folder = launch_folder()
    if folder is not None:
        note = {"name": run_dir.name, "started": (read_run(run_dir) or {}).get("started")}
        with suppress(OSError):  # Without the note, the next attempt begins as this one did.
            write_text(folder / ATTEMPT_FILE, json.dumps(note))


def run_of_attempt(output_dir: str | Path, name: str) -> str | None:
    """The name of the run that an earlier attempt of this torchrun has begun or continued; None if there is none.

    A run that began at another time is another one: it was replaced by that attempt, and is back since.

    Args:
        name: as this start gives it, or "auto".
    """
    folder = launch_folder()
    if folder is None or restarts() == 0:
        return None
    note = read_record(folder / ATTEMPT_FILE)
    noted_name = str(note.get("name"))
    if name not in (AUTO, noted_name):
        return None
    run = read_run(Path(output_dir) / noted_name)
    return noted_name if run is not None and run["started"] == note.get("started") else None


def read_run(run_dir: str | Path) -> dict[str, Any] | None:
    """What `run.json` says: name, kind, started and perhaps resumed (seconds since 1970), order; None if it is not a
    run.

    `order` grows from start to start, whatever the clock says.
    """
    record = read_record(Path(run_dir) / RUN_FILE)
    if record.get("kind") not in KINDS:
        return None
    numbers = (record.get("started"), record.get("resumed", 0.0), record.get("order"))
    return record if all(type(number) in (int, float) for number in numbers) else None


def only_pretrained(model: str | Path) -> bool:
    """Whether a model is a run's, or one of its checkpoints, that has learnt to fill gaps in text and nothing after."""
    folder = Path(model)
    records = filter(None, map(read_run, (folder, *folder.parents[:2])))
    return is_pretraining(str(next(records, {}).get("objective")))


@dataclass(frozen=True)
class SavedRun:
    """A run as its folder says.

    Args:
        kind: one of `KINDS`.
        objective: what it has trained on; empty where it does not say.
        order: grows with each start and resume, whatever the clock says.
    """

    folder: Path
    kind: str
    objective: str
    order: float

    @property
    def model_folder(self) -> Path | None:
        """See `model_folder`."""
        return model_folder(self.folder)

    @property
    def is_finished(self) -> bool:
        """Whether it has published its model."""
        return self.model_folder == self.folder

    @property
    def is_of_text(self) -> bool:
        """Whether it has pretrained on text."""
        return self.kind == "pretrain" and is_pretraining(self.objective)


def runs_newest_first(output_dir: str | Path) -> list[SavedRun]:
    """The runs of a folder, which may be missing, in the order in which they were started or resumed last."""
    runs = [
        SavedRun(folder, record["kind"], record.get("objective", ""), record["order"])
        for folder in saved_runs(Path(output_dir))
        if (record := read_run(folder)) is not None
    ]
    return sorted(runs, key=lambda run: (run.order, run.folder), reverse=True)


def _next_order(output_dir: Path) -> float:
    """The time, but after every run that is there: a clock that is set back does not change which is the newest."""
    runs = runs_newest_first(output_dir)
    return max(time.time(), runs[0].order + 1e-3) if runs else time.time()


def model_folder(run_dir: str | Path) -> Path | None:
    """The folder with a run's model: the run's own once it is published, else its best or its latest checkpoint."""
    run_dir = Path(run_dir)
    if any(all((run_dir / name).is_file() for name in files) for files in (MODEL_FILES, ADAPTER_FILES)):
        return run_dir
    checkpoints = Checkpoints(run_dir, keep_latest=1)
    return checkpoints.best() or checkpoints.latest()


def publish(checkpoint: Path, run_dir: str | Path) -> None:
    """Make a checkpoint's model the run's own, taking no further space where the file system has hard links.

    Args:
        checkpoint: its files go into `run_dir`, each at once, their sums last; what only resuming needs stays behind.
    Raises:
        UserError: the checkpoint is damaged; or the disk is full or cannot be written: every file is whole, the old or
            the new one.
    """
    problems: list[str] = [say("{checkpoint} is no longer there", checkpoint=checkpoint)]
    if checkpoint.is_dir():
        problems = damages(checkpoint, with_state=False)
    if problems:
        text = "--output_dir = {parent}, the model was not published; take another checkpoint of {run_dir}"
        raise UserError(
            *(say("checkpoint = {checkpoint}, {damage}", checkpoint=checkpoint, damage=damage) for damage in problems),
            say(text, parent=Path(run_dir).parent, run_dir=run_dir),
        )
    # The weights go first: a folder that has a config.json is then complete.
    names = [path.relative_to(checkpoint) for path in published_files(checkpoint)]
    names.sort(key=lambda name: name.as_posix() == "config.json")
    sums = read_sums(checkpoint)
    try:
        Path(run_dir, CHECKSUMS_FILE).unlink(missing_ok=True)  # It is of the model before, until all files are there.
        for name in names:
            Path(run_dir, name).parent.mkdir(exist_ok=True)
            with atomic_file(Path(run_dir, name)) as fresh:
                try:
                    os.link(checkpoint / name, fresh)
                except OSError:  # There are no hard links, or it is another disk.
                    shutil.copyfile(checkpoint / name, fresh)
        if sums is not None:
            published = {name: entry for name, entry in sums["files"].items() if Path(name) in names}
            with atomic_file(Path(run_dir, CHECKSUMS_FILE)) as fresh:
                write_sums(fresh, published)
    except OSError as error:
        raise UserError(
            "--output_dir = {parent}, cannot be written: {reason}; free space; the model is whole in {checkpoint}",
            parent=Path(run_dir).parent,
            reason=reason_of(error),
            checkpoint=checkpoint,
        ) from error


def _write_record(run_dir: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    # A record that was damaged may hold halves of letters.
    write_text(run_dir / RUN_FILE, text.encode("utf8", "replace").decode("utf8"))
