"""`prepare`: token shards written, and what became of the rows."""

from __future__ import annotations

import shlex

from commands.row_facts import examples_of
from data.prepare import preparing
from data.prepare.data_tokenizer import tokenizer_folder
from data.prepare.looking import look, tokenizer_limits
from data.prepare.preview import lost_of_shards, table_of_files
from data.prepare.training_data import find_training_data, refuse_ineffective
from data.shards.store import LengthFacts, Manifest
from settings.declared import Config
from settings.program import program
from settings.tasks import command_of
from support.language import say
from support.storage import make_once
from training.report.progress import Progress

COUNT_NAMES = {
    "rows": "rows",
    "tokens": "tokens",
    "texts": "texts",
    "bad_rows": "bad rows",
    "empty_rows": "empty rows",
    "cut_rows": "cut rows",
    "cut_tokens": "cut tokens",
    "unknown_tokens": "unknown tokens",
    "dropped_rows": "dropped rows",
    "duplicate_rows": "duplicate rows",
}


def prepare(config: Config) -> None:
    """Write token shards and tell what became of the rows; or with `preview` show examples as the model receives them.

    Raises:
        UserError: the data, the tokenizer or a folder is not usable.
    Memory:
        a few hundred MB at any size of the data.
    """
    if config.prepare.preview:  # Writes no shards, and at most a tokenizer into the cache.
        settings = config.data
        training_data = look(config, find_training_data, settings, config.train.is_finetune)
        if training_data.shards is None:
            refuse_ineffective(config, training_data)
            kind = config.tokenizer.tokenizer_type
            limits = tokenizer_limits(config.memory.memory_budget)
            size = config.model.vocab_size
            folder = look(config, tokenizer_folder, settings, kind, size, training_data, make_once, limits)
            table = look(
                config, table_of_files, settings, training_data, config.cleaning, config.prepare.preview, folder
            )
        else:
            table = examples_of(preparing.prepare(config), config, config.prepare.preview)
        heading = say("examples exactly as the model receives them ({objective})", objective=training_data.objective)
        Progress(1).table(heading, table)
        return
    prepared = preparing.in_child(preparing.prepare, config)
    task = prepared.task
    folder = prepared.train_dir.parent
    rows: list[tuple[str, str]] = [
        (say("folder"), str(folder)),
        (say("objective"), prepared.objective),
        (say("tokenizer"), str(prepared.tokenizer_dir)),
    ]
    for name, count in prepared.counts.items():
        split, _, what = name.partition("_")
        if count:
            rows.append((say("{split} {what}", split=say(split), what=say(COUNT_NAMES[what])), f"{count:,}"))
    rows += task.show_labels(prepared.labels, prepared.label_counts)
    lengths = Manifest.of(prepared.train_dir).lengths(prepared.train_dir.name)
    for column, facts in lengths.items():
        if title := task.length_title(column):
            rows.append((title, _lengths_in_words(facts)))
    rows += [*lost_of_shards(config.data, prepared), *prepared.unread]
    flags = " --is_finetune=True" if config.train.is_finetune else ""
    next_command = f"{program()} {command_of(task.name)} --train_file={shlex.quote(str(folder))}{flags}{task.flags}"
    Progress(1).table(say("token shards"), [*rows, (say("next"), next_command)])


def _lengths_in_words(facts: LengthFacts) -> str:
    numbers = {name: f"{facts[name]:,}" for name in ("mean", "longest", "longest_uncut")}
    if facts["longest_uncut"] > facts["longest"]:
        return say("mean {mean}, longest {longest} (uncut {longest_uncut})", **numbers)
    return say("mean {mean}, longest {longest}", **numbers)
