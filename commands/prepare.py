"""How does `prepare` write token shards and tell what became of the rows?"""

from __future__ import annotations

import data.prepare.preparing
from config import PREFERENCES, Config
from data.batches.loader import StepLoader
from data.prepare.seen import columns_of_shards, cut_of_shards, rows_of_files, rows_of_shards, told
from data.shards.store import Manifest
from data.tokenizers.tokenizer import Tokenizer
from language import say
from training.report.progress import Progress


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
    prepared = data.prepare.preparing.prepare(config)
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


def _preview(config: Config) -> None:
    """Show rows as the model will see them; writes no shards, and at most a tokenizer into the cache."""
    task, rows, cut = rows_of_files(config, config.prepare.preview)
    columns = task.columns
    if task.shards is not None:
        prepared = data.prepare.preparing.prepare(config)
        loader = StepLoader(prepared.train_dir, prepared.objective, config)
        rows = rows_of_shards(loader, Tokenizer.load(prepared.tokenizer_dir), config.prepare.preview)
        columns, cut = columns_of_shards(prepared), cut_of_shards(config, prepared)
    table = told(rows, columns)
    Progress(1).table(
        f"rows as the model will see them ({task.objective})", [*table, *([(say("cut"), cut)] if cut else [])]
    )
