"""What do the commands do that do not train? Each takes the checked settings and tells its result."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import data.prepare
from config import PREFERENCES, Config, UserError
from data.shards import Manifest
from data.task import decide, tokenizer_quality, train_task_tokenizer
from settings import AUTO
from training.answering import generate
from training.chat import chat
from training.check_command import check
from training.convert import convert
from training.evaluate_command import evaluate
from training.merging import merge
from training.progress import Progress
from training.quantizing import quantize

__all__ = ["chat", "check", "convert", "evaluate", "generate", "merge", "prepare", "quantize", "tokenizer"]

TOKENIZER_FILE = "tokenizer.json"


def tokenizer(config: Config) -> None:
    """Train a tokenizer on `train_file` and write it to `tokenizer_dir`, by default `output_dir`/tokenizer.

    Raises:
        UserError: there is one already, the data cannot be read, or the folder cannot be written.
    Memory:
        a few times `tokenizer_sample`.
    """
    given = config.data.tokenizer_dir
    folder = Path(config.run.output_dir) / "tokenizer" if given == AUTO else Path(given)
    if (folder / TOKENIZER_FILE).exists() and not config.run.overwrite:
        raise UserError(f"--tokenizer_dir = {folder}, holds a tokenizer; name another folder or use --overwrite=True")
    task = decide(config)
    if task.shards is not None:
        raise UserError(f"--train_file = {task.shards}, holds token shards, no text; name the text they were made from")
    trained = train_task_tokenizer(config, task)
    partial = folder.with_name(f".tmp-{folder.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        trained.save(partial)
        folder.mkdir(exist_ok=True)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == TOKENIZER_FILE):
            os.replace(path, folder / path.name)
    except OSError as error:
        raise UserError(
            f"--tokenizer_dir = {folder}, cannot be written: {error.strerror}; name another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    source = "" if config.data.train_file is None else f" --train_file={config.data.train_file}"
    rows = [
        ("folder", str(folder)),
        ("ids", f"{trained.size:,}, {trained.num_sentinels} of them sentinels"),
        *((name, str(measured)) for name, measured in tokenizer_quality(config, task, trained).items()),
        ("next", f"python train_low_mem.py train{source} --tokenizer_dir={folder}"),
    ]
    Progress(1).table(f"{config.tokenizer.tokenizer_type} tokenizer", rows)


def prepare(config: Config) -> None:
    """Write token shards and tell what became of the rows.

    Raises:
        UserError: the data, the tokenizer or a folder is not usable.
    Memory:
        a few hundred MB at any size of the data.
    """
    prepared = data.prepare.prepare(config)
    folder = prepared.train_dir.parent
    rows = [("folder", str(folder)), ("objective", prepared.objective), ("tokenizer", str(prepared.tokenizer_dir))]
    rows += [(name.replace("_", " "), f"{count:,}") for name, count in prepared.counts.items() if count]
    manifest = Manifest.of(prepared.train_dir)
    for column, facts in manifest.lengths(prepared.train_dir.name).items():
        longest = f"longest {facts['longest']:,}" + (
            f" (uncut {facts['longest_uncut']:,})" if facts["longest_uncut"] > facts["longest"] else ""
        )
        rows.append((f"tokens of {column}", f"mean {facts['mean']:,}, {longest}"))
    for reason, entry in manifest.content["dropped"].items():
        samples = ", ".join(repr(sample[:60]) for sample in entry["samples"])
        rows.append((f"left out: {reason}", f"{entry['count']:,}, such as {samples}"))
    command = "dpo" if prepared.objective == PREFERENCES else "train"
    Progress(1).table("token shards", [*rows, ("next", f"python train_low_mem.py {command} --train_file={folder}")])
