"""`prepare`: token shards written, and what became of the rows."""

from __future__ import annotations

import shlex

import data.prepare.preparing
from data.batches.loader import StepLoader
from data.prepare.looking import look
from data.prepare.preview import lost_of_shards, table_of_files, table_of_shards
from data.shards.store import STREAM, Manifest
from data.tokenizers.tokenizer import Tokenizer
from language import say
from settings.consistency import HEADS, PREFERENCES
from settings.declared import Config
from settings.program import program
from training.report.progress import Progress

COUNT_NAMES = {
    "rows": "rows", "tokens": "tokens", "texts": "texts", "bad_rows": "bad rows", "empty_rows": "empty rows", "cut_rows": "cut rows",
    "cut_tokens": "cut tokens", "unknown_tokens": "unknown tokens", "dropped_rows": "dropped rows", "duplicate_rows": "duplicate rows",
}  # fmt: skip


def prepare(config: Config) -> None:
    """Write token shards and tell what became of the rows.

    Raises:
        UserError: the data, the tokenizer or a folder is not usable.
    Memory:
        a few hundred MB at any size of the data.
    """
    if config.prepare.preview:
        _preview(config)
        return
    prepared = data.prepare.preparing.in_child(data.prepare.preparing.prepare, config)
    folder = prepared.train_dir.parent
    rows: list[tuple[str, str]] = [
        (say("folder"), str(folder)), (say("objective"), prepared.objective), (say("tokenizer"), str(prepared.tokenizer_dir))
    ]  # fmt: skip
    for name, count in prepared.counts.items():
        split, _, what = name.partition("_")
        if count:
            rows.append((say("{split} {what}", split=say(split), what=say(COUNT_NAMES[what])), f"{count:,}"))
    if prepared.objective in HEADS:
        counts = zip(prepared.labels, prepared.label_counts, strict=True)
        told = ", ".join(f"{name} {count:,}" for name, count in counts)
        rows.append((say("labels"), told or say("numbers (regression)")))
    manifest = Manifest.of(prepared.train_dir)
    for column, facts in manifest.lengths(prepared.train_dir.name).items():
        if column == "labels" and prepared.objective in HEADS:
            continue
        known = {name: f"{facts[name]:,}" for name in ("mean", "longest", "longest_uncut")}
        told_lengths = say("mean {mean}, longest {longest}", **known)
        if facts["longest_uncut"] > facts["longest"]:
            told_lengths = say("mean {mean}, longest {longest} (uncut {longest_uncut})", **known)
        title = say("tokens per text") if manifest.kind == STREAM else say("tokens of {column}", column=column)
        rows.append((title, told_lengths))
    rows += [*lost_of_shards(config, prepared), *prepared.unread]
    command = "dpo" if prepared.objective == PREFERENCES else "train"
    tunes = " --is_finetune=True" if config.train.is_finetune else ""
    tunes += f" --head={prepared.objective}" if prepared.objective in HEADS else ""
    next_line = f"{program()} {command} --train_file={shlex.quote(str(folder))}{tunes}"
    Progress(1).table(say("token shards"), [*rows, (say("next"), next_line)])


def _preview(config: Config) -> None:
    """Show examples as the model receives them; writes no shards, and at most a tokenizer into the cache."""
    task, table = look(config, table_of_files, config, config.prepare.preview)
    if task.shards is not None:
        prepared = data.prepare.preparing.prepare(config)
        loader = StepLoader(prepared.train_dir, prepared.objective, config)
        table = table_of_shards(
            config, prepared, loader, Tokenizer.load(prepared.tokenizer_dir), config.prepare.preview
        )
    title = say("examples exactly as the model receives them ({objective})", objective=task.objective)
    Progress(1).table(title, table)
