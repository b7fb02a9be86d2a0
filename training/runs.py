"""Which runs are there, and may a new one begin? One folder a run, described by its `run.json`.

All refusals come before anything is created.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from settings import UserError
from training.checkpoints import TEMPORARY, Checkpoints

RUN_FILE, SETTINGS_FILE = "run.json", "settings.json"
KINDS = ("pretrain", "finetune", "dpo")
MODEL_FILES = ("config.json", "model.safetensors")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NAME = re.compile(r"[^\W.][\w.+=@ -]*")


def new_run_name(kind: str, now: float | None = None) -> str:
    """The name of a run that got none: kind and time, e.g. `pretrain_20250131_120000`."""
    return f"{kind}_{time.strftime('%Y%m%d_%H%M%S', time.localtime(now))}"


def check_new_run(output_dir: str | Path, name: str, overwrite: bool = False) -> list[str]:
    """Find what stands against a new run, creating nothing.

    Returns:
        problems, as `UserError` takes them; empty if all is well.
    """
    problems = []
    if not _NAME.fullmatch(name) or name != name.strip() or name.endswith("."):
        problems.append(f"--run_name = {name}, is no folder name; use letters, digits, _ and -")
    problems += check_writable("output_dir", output_dir)
    if problems:
        return problems
    run_dir = Path(output_dir) / name
    if _exists(run_dir):
        if not overwrite:
            problems.append(
                f"--run_name = {name}, exists in {output_dir}; name another, resume it with --is_keep_training=True "
                "or replace it with --overwrite=True"
            )
        elif not (run_dir / RUN_FILE).is_file():
            problems.append(
                f"--run_name = {name}, {run_dir} is no run of this program and is not replaced; name another"
            )
    return problems


def check_writable(flag: str, folder: str | Path) -> list[str]:
    """Find what keeps the folder that a flag names from being made or written, creating nothing."""
    obstacle = _why_unwritable(Path(folder))
    return [f"--{flag} = {folder}, cannot be written: {obstacle}; name another folder"] if obstacle else []


def create_run(output_dir: str | Path, name: str, kind: str, *, overwrite: bool = False, is_main: bool = True) -> Path:
    """Make the folder of a new run.

    Args:
        output_dir: folder of all runs; made if missing.
        name: the run's, the same on all processes.
        kind: one of `KINDS`.
        overwrite: replace an existing run of that name.
        is_main: other processes create nothing.
    Returns:
        the run's folder.
    Raises:
        UserError: the name exists or is no folder name, or the folder cannot be written.
    """
    assert kind in KINDS
    run_dir = Path(output_dir) / name
    if not is_main:
        return run_dir
    problems = check_new_run(output_dir, name, overwrite)
    if problems:
        raise UserError(*problems)
    try:
        if _exists(run_dir):
            going = run_dir.with_name(f"{TEMPORARY}{name}")
            shutil.rmtree(going, ignore_errors=True)
            os.replace(run_dir, going)
            shutil.rmtree(going)
        run_dir.mkdir(parents=True, exist_ok=True)
        _write_record(run_dir, {"name": name, "kind": kind, "started": time.time()})
    except OSError as error:
        raise UserError(
            f"--output_dir = {output_dir}, cannot be written: {error.strerror}; name another folder"
        ) from error
    return run_dir


def resume_run(run_dir: str | Path, is_main: bool = True) -> Path:
    """Note that a run goes on, which makes it the newest one.

    Raises:
        UserError: it cannot be written.
    """
    run_dir = Path(run_dir)
    if is_main:
        try:
            _write_record(run_dir, {**(read_run(run_dir) or {}), "resumed": time.time()})
        except OSError as error:
            raise UserError(f"--output_dir = {run_dir.parent}, cannot be written: {error.strerror}") from error
    return run_dir


def read_run(run_dir: str | Path) -> dict[str, Any] | None:
    """What `run.json` says: name, kind, started and perhaps resumed (seconds since 1970); None if it is no run."""
    try:
        record = json.loads((Path(run_dir) / RUN_FILE).read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.get("kind") in KINDS and "started" in record else None


def newest_run(output_dir: str | Path, kind: str | None = None, needs_model: bool = False) -> Path | None:
    """The run that was started or resumed last.

    Args:
        output_dir: folder of all runs; may be missing.
        kind: one of `KINDS`; None: any.
        needs_model: pass over runs that have saved nothing yet.
    """
    found = []
    for path in Path(output_dir).glob(f"*/{RUN_FILE}"):
        record = read_run(path.parent)
        if record is None or path.parent.name.startswith("."):
            continue
        if kind in (None, record["kind"]) and not (needs_model and model_folder(path.parent) is None):
            found.append((max(record["started"], record.get("resumed", 0.0)), path.parent))
    return max(found)[1] if found else None


def model_folder(run_dir: str | Path) -> Path | None:
    """The folder with a run's model: the run's own once it is published, else its best or its latest checkpoint."""
    run_dir = Path(run_dir)
    if any(all((run_dir / name).is_file() for name in files) for files in (MODEL_FILES, ADAPTER_FILES)):
        return run_dir
    checkpoints = Checkpoints(run_dir, keep_latest=1, is_main=False)
    return checkpoints.best() or checkpoints.latest()


def publish(checkpoint: Path, run_dir: str | Path, is_main: bool = True) -> None:
    """Make a checkpoint's model the run's own, taking no further space where the file system has hard links.

    Args:
        checkpoint: its files go into `run_dir`, each at once; `state/` stays behind.
    Raises:
        UserError: the disk is full or cannot be written; every file is whole, the old or the new one.
    """
    if not is_main:
        return
    # the weights first: a folder that has a config.json is then complete
    files = sorted(
        (path for path in checkpoint.iterdir() if path.is_file()), key=lambda path: path.name == "config.json"
    )
    for source in files:
        fresh = Path(run_dir) / f"{TEMPORARY}{source.name}"
        try:
            fresh.unlink(missing_ok=True)
            try:
                os.link(source, fresh)
            except OSError:
                shutil.copyfile(source, fresh)
            os.replace(fresh, Path(run_dir) / source.name)
            fresh.unlink(missing_ok=True)  # renaming a link onto the very same file leaves both
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise UserError(
                f"--output_dir = {Path(run_dir).parent}, cannot be written: {error.strerror}; free space; "
                f"the model is whole in {checkpoint}"
            ) from error


def _write_record(run_dir: Path, record: dict[str, Any]) -> None:
    fresh = run_dir / f"{TEMPORARY}{RUN_FILE}"
    fresh.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    os.replace(fresh, run_dir / RUN_FILE)


def _exists(run_dir: Path) -> bool:
    """Whether something is in the way; an empty folder is not."""
    return run_dir.is_symlink() or (run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())))


def _why_unwritable(folder: Path) -> str:
    """Say why a folder cannot be made or written; empty if it can, as far as can be told without trying."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} is not writable"
