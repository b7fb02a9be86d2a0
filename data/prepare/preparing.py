"""Text to token shards, once for all runs.

`prepare` decides what is trained, finds or trains the tokenizer, reads the rows, encodes them and writes shards under
the cache folder, named by a fingerprint of everything that shapes them: files, columns, tokenizer, lengths, settings.
A second run with the same fingerprint finds them there; an interrupted attempt continues after its last whole shard.
Reading and encoding take memory that training needs, so `in_child` does it in a process of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.batches.mixture import named_weights
from data.prepare.data_tokenizer import missing_tokens, read_extra_tokens, tokenizer_folder
from data.prepare.looking import forget, look, tokenizer_limits, workers
from data.prepare.training_data import (
    TrainingData,
    check_tokenizer,
    find_training_data,
    held_out_sources,
    named_files,
    refuse_ineffective,
)
from data.prepare.unread import passed_over
from data.prepare.writing import Job, Writing, clear
from data.progress import noted_in
from data.shards import store as shards
from data.shards.store import TOKENIZER, TRAIN, VALIDATION, Manifest, is_shards
from data.sources.columns import Columns
from data.sources.files import set_names, source_facts, sources_fingerprint
from data.sources.source import Source
from data.task import Table, TaskProtocol
from data.text.templates import Template, template_of
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import Config, DataConfig
from settings.errors import UserError, collected, refuse
from settings.fields import AUTO, at_home, listed
from settings.needs import without_effect
from settings.tasks import task_named
from support.language import say
from support.storage import (
    NotMade,
    Once,
    fingerprint,
    make_once,
    only_if_made,
    read_once_made,
    remove_damaged,
    sync,
    write_text,
    writing,
)

FORMAT = 5  # Raise it when the same text would give other shards.


class StoredSplit(NamedTuple):
    """One split of a shards folder."""

    manifest: Manifest
    name: str

    @property
    def folder(self) -> Path:
        return self.manifest.root / self.name


@dataclass(frozen=True)
class Prepared:
    """Shards ready to train on.

    Args:
        train_dir, validation_dir: splits of a shards folder; tokenizer_dir: the tokenizer they were written with.
        objective: a key of `settings.tasks.TASKS`.
        counts: `train_rows`, `train_tokens`, `train_texts`, `train_bad_rows`, `train_empty_rows`, `train_cut_rows`,
            `train_cut_tokens`, `train_unknown_tokens`, `train_dropped_rows`, `train_duplicate_rows`, and the same with
            `validation_`.
        unread: files and columns that were not read, for a table.
        labels: the names of labels, in order; none: they are numbers, or there are none.
        label_counts: how often each is trained on.
        cached: the shards folder under `cache_dir`; None: none of these shards are there.
    """

    train_dir: Path
    validation_dir: Path
    tokenizer_dir: Path
    objective: str
    counts: dict[str, int]
    unread: Table
    labels: tuple[str, ...] = ()
    label_counts: tuple[int, ...] = ()
    cached: Path | None = None

    @property
    def task(self) -> TaskProtocol:
        """The task of the objective."""
        task: TaskProtocol = task_named(self.objective)
        return task


def prepare(config: Config, note: Path | None = None, once: Once = make_once) -> Prepared:
    """Shards for these settings: those that the user named, those of the cache, or new ones.

    Args:
        note: file that shows the progress to other processes; None: no file.
        once: `only_if_made` to make nothing new.
    Raises:
        UserError: the data, the tokenizer or a folder is not usable. NotMade: by `only_if_made`.
    Memory:
        at most 1 GiB whatever the size of the data, bounded by `data.prepare.looking`.
    """
    data = config.data
    with noted_in(note):
        validation_shards: StoredSplit | None = None
        problems = list[str]()  # The problems of all three steps are reported at once.
        with collected(problems):
            training_data = find_training_data(data, config.train.is_finetune, once)
        with collected(problems):
            validation = held_out_sources(data)
            if data.validation_file is not None and is_shards(data.validation_file):
                validation_shards = _split_of(data.validation_file, VALIDATION)
        with collected(problems):
            check_tokenizer(data)
        refuse(problems)
        task = training_data.task
        if data.mixture_weights is not None and training_data.shards is None:
            named_weights(data.mixture_weights, training_data.parts)  # Of finished shards, the loader checks them.
        names = task.label_names(data, config.model, training_data, once)
        refuse_ineffective(config, training_data, validation)
        cached: Path | None = None
        if training_data.shards is None:
            columns = replace(training_data.columns, names=names)
            tokenizer_dir = _tokenizer_dir(config, training_data, once)
        else:
            columns = replace(task.columns_of(data, validation), names=names)
            train = _split_of(training_data.shards, TRAIN)
            held_out = StoredSplit(train.manifest, VALIDATION)  # unless validation data are named, see below
            tokenizer_dir = train.manifest.root / TOKENIZER
            if data.tokenizer_dir != AUTO:
                _check_same_tokenizer(train.manifest, _tokenizer_dir(config, training_data, once))
            _check_same_template(data, task, train.manifest, tokenizer_dir)
            _check_extra_tokens(data.extra_tokens, tokenizer_dir)
        if training_data.sources or validation:  # Something has to be encoded.
            hold_out = validation_shards is None and not validation
            job = _job(config, training_data, columns, tokenizer_dir, training_data.sources, validation, hold_out)
            manifest, cached = _make_shards(config, job, tokenizer_dir, once)
            held_out = StoredSplit(manifest, VALIDATION)
            if training_data.sources:
                train = StoredSplit(manifest, TRAIN)
        if validation_shards is not None:
            held_out = validation_shards
            _check_same_tokenizer(held_out.manifest, train.manifest.root / TOKENIZER)
            _check_same_template(data, task, held_out.manifest, train.manifest.root / TOKENIZER)
        return _prepared(data, task, train, held_out, cached)


def prepare_evaluation(config: Config, note: Path | None = None, once: Once = make_once) -> Prepared:
    """Shards to evaluate on: all rows of `validation_file`; without one, the rows that `prepare` holds out.

    Returns:
        `validation_dir` holds the rows; `train_dir` is the same folder if there is a `validation_file`.
    Raises:
        as `prepare`.
    """
    data = config.data
    if data.validation_file is None:
        return prepare(config, note, once)
    with noted_in(note):
        rows = find_training_data(data, config.train.is_finetune, once, "validation_file")
        refuse(without_effect(config, ("objective",), rows.objective))
        if rows.shards is not None:
            split = _split_of(rows.shards, VALIDATION)
            return _prepared(data, rows.task, split, split, None)
        columns = replace(rows.columns, names=rows.task.label_names(data, config.model, rows, once))
        tokenizer_dir = _tokenizer_dir(config, rows, once)
        job = _job(config, rows, columns, tokenizer_dir, (), rows.sources, hold_out=False)
        manifest, cached = _make_shards(config, job, tokenizer_dir, once)
        split = StoredSplit(manifest, VALIDATION)
        return _prepared(data, rows.task, split, split, cached)


def find_prepared(config: Config) -> Prepared | None:
    """Finished shards for these settings; None if some have to be made first.

    Raises:
        UserError: as `prepare`.
    """
    try:
        return prepare(config, once=only_if_made)
    except NotMade:
        return None


def in_child(
    function: Callable[..., Prepared], config: Config, note: Path | None = None, checked: Sequence[str] = ()
) -> Prepared:
    """Call `prepare` or `prepare_evaluation`, in a process of its own if files are named or something has to be made.

    Args:
        function: `prepare` or `prepare_evaluation`.
        checked: splits that will be read, `train`, `validation` or both. Their checksums are verified; damaged shards
            in the cache are made anew.
    Raises:
        UserError: as `function`, and where shards that the user named are damaged.
        DoesNotFit: it needs more memory than the budget leaves.
    """

    def prepared_by_child() -> Prepared:
        if not named_files(config.data):
            with suppress(NotMade):
                return function(config, note, only_if_made)
        return look(config, function, config, note, always_in_child=True)

    try:
        prepared = prepared_by_child()
        folders = {TRAIN: prepared.train_dir, VALIDATION: prepared.validation_dir}
        checked_folders = [folders[name] for name in checked]
        try:
            shards.check_shards(*checked_folders)
        except UserError:
            cached_folders = [folder for folder in checked_folders if folder.parent == prepared.cached]
            if prepared.cached is None or not cached_folders:
                raise
            remove_damaged(prepared.cached, lambda _: shards.check_shards(*cached_folders))
            prepared = prepared_by_child()
            shards.check_shards(*checked_folders)
        return prepared
    except KeyboardInterrupt:
        text = "interrupted while preparing data; the same command continues where it stopped"
        raise KeyboardInterrupt(say(text)) from None
    finally:
        forget()


def _split_of(path: str | Path, name: str) -> StoredSplit:
    """The split that a path names. For a whole shards folder, the split of this name, or its first if there is none."""
    manifest = Manifest.of(Path(path))
    if manifest.root != Path(path):
        return StoredSplit(manifest, Path(path).name)
    names = list(manifest.content["splits"])
    return StoredSplit(manifest, name if name in names else names[0])


def _tokenizer_dir(config: Config, training_data: TrainingData, once: Once) -> Path:
    kind = config.tokenizer.tokenizer_type
    limits = tokenizer_limits(config.memory.memory_budget)
    return tokenizer_folder(config.data, kind, config.model.vocab_size, training_data, once, limits)


def _check_same_tokenizer(manifest: Manifest, folder: Path) -> None:
    if manifest.content["tokenizer"]["fingerprint"] != Tokenizer.load(folder).fingerprint:
        raise UserError(
            "{root}: was written with another tokenizer than {folder}; use --tokenizer_dir={tokenizer_dir}, or "
            "prepare the text again",
            root=manifest.root,
            folder=folder,
            tokenizer_dir=manifest.root / TOKENIZER,
        )


def _check_extra_tokens(extra_tokens: str | None, folder: Path) -> None:
    if extra_tokens is None:
        return
    missing = missing_tokens(Tokenizer.load(folder), read_extra_tokens(extra_tokens))
    if missing:
        raise UserError(
            "--extra_tokens = {extra_tokens}, the shards were written without {missing}; prepare the text again "
            "with the same --extra_tokens",
            extra_tokens=extra_tokens,
            missing=listed(missing),
        )


def _check_same_template(data: DataConfig, task: TaskProtocol, manifest: Manifest, template_dir: Path) -> None:
    """Refuse shards whose prompts were written with another template than that of these settings or `template_dir`."""
    written = Template.read(manifest.root / TOKENIZER) or Template()
    if task.uses_template and template_of(data, template_dir) != written:
        raise UserError(
            "{root}: was written with --prompt_template={name!r} and --source_prefix={prefix!r}; use the same "
            "for all, or prepare the text again",
            root=manifest.root,
            name=written.name,
            prefix=written.prefix,
        )


def _job(
    config: Config,
    training_data: TrainingData,
    columns: Columns,
    tokenizer_dir: Path,
    train: Sequence[Source],
    validation: Sequence[Source],
    hold_out: bool,
) -> Job:
    data = config.data
    task = training_data.task
    return Job(
        task=task,
        columns=columns,
        train=train,
        validation=validation,
        hold_out=hold_out,
        limits=task.limits(data),
        max_samples=data.max_samples,
        skip_bad_rows=data.skip_bad_rows,
        parts=training_data.parts,
        sets=set_names(data.validation_file),
        examples=task.examples(data, config.cleaning.clean, columns, tokenizer_dir),
        dedup=config.cleaning.dedup,
        facts=task.shard_facts(data, columns),
    )


def _make_shards(config: Config, job: Job, tokenizer_dir: Path, once: Once) -> tuple[Manifest, Path | None]:
    """The manifest of a job's shards, which are written unless they exist, and their folder if it is in the cache."""
    tokenizer = Tokenizer.load(tokenizer_dir)
    if job.task.needs_sentinels and not tokenizer.num_sentinels:
        raise UserError(
            "--tokenizer_dir = {tokenizer_dir}, has no sentinels <extra_id_0> ..., which {objective} needs",
            tokenizer_dir=tokenizer_dir,
            objective=job.task.name,
        )
    tokenizer.template = replace(job.examples.template or tokenizer.template, has_turns=job.columns.has_turns)
    settings = _content_settings(job)
    identity = fingerprint([settings, tokenizer.fingerprint])

    def write(folder: Path) -> None:
        writer = Writing(job, folder, identity, tokenizer.size)
        size = sum(source.path.stat().st_size for source in (*job.train, *job.validation))
        encoders = workers(config.prepare.prepare_workers, config.run.num_threads, config.memory.memory_budget, size)
        splits = writer.run(tokenizer_dir, encoders)
        tokenizer.save(folder / TOKENIZER)
        content = {
            "format": shards.FORMAT,
            "kind": job.task.shards.kind,
            "fingerprint": identity,
            "settings": settings,
            "sources": {TRAIN: source_facts(job.train), VALIDATION: source_facts(job.validation)},
            # What training needs of the tokenizer, so that it need not load it:
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint,
                "size": tokenizer.size,
                "pad_id": tokenizer.pad_id,
                "eos_id": tokenizer.eos_id,
                "sentinel_ids": list(tokenizer.sentinel_ids),
            },
            "splits": splits,
            "dropped": writer.dropped.reasons,
            "labels": list(job.columns.names or ()),
            "label_counts": {name: split.label_counts for name, split in writer.splits.items()},
        }
        sync(folder / TOKENIZER)
        write_text(folder / shards.MANIFEST, json.dumps(content, indent=1) + "\n")

    def make(folder: Path) -> None:
        try:
            # An earlier attempt may have written everything, and was interrupted before the folder was renamed.
            _cached_shards(folder, identity)
        except (UserError, ValueError):
            write(folder)
        clear(folder)

    if config.prepare.shards_dir == AUTO:
        target = Path(config.data.cache_dir) / f"shards-{identity}"
        read = partial(_cached_shards, identity=identity)
        return read_once_made(target, make, read, once, resumable=True), target
    target = Path(at_home(config.prepare.shards_dir))
    _check_shards_dir(target)
    manifest = Manifest.read(once(target, make, resumable=True, flag="shards_dir"))
    if manifest.content["fingerprint"] != identity:
        raise UserError(
            "--shards_dir = {target}, holds shards of other data or settings; choose another folder or delete it",
            target=target,
        )
    return manifest, None


def _cached_shards(folder: Path, identity: str) -> Manifest:
    """The manifest of complete shards in a folder. The rows are not read here: `in_child` verifies their checksums.

    Raises:
        UserError, ValueError: a file is missing, or is not what was written.
    """
    manifest = Manifest.read(folder)
    if manifest.content["fingerprint"] != identity:
        raise ValueError("shards of another job")
    for split in manifest.content["splits"]:
        manifest.files(split)
    _check_same_tokenizer(manifest, folder / TOKENIZER)
    return manifest


def _content_settings(job: Job) -> dict[str, object]:
    """Everything that the content of the shards depends on, except the tokenizer."""
    facts: dict[str, object] = {
        "format": FORMAT,
        "kind": job.task.shards.kind,
        "columns": job.columns.sides(),
        "train": sources_fingerprint(job.train),
        "validation": sources_fingerprint(job.validation),
        "hold_out": job.hold_out,
        "max_samples": job.max_samples,
        "skip_bad_rows": job.skip_bad_rows,
        "clean": job.examples.clean,
        "dedup": job.dedup,
    }
    # These add nothing to the fingerprint where they have their defaults.
    if job.sets:
        facts["validation_sets"] = list(job.sets)
    if job.examples.template not in (None, Template()):
        facts |= job.examples.template.as_dict()
    if job.examples.each_turn and job.columns.form != "plain":
        facts["expand_turns"] = True
    return facts | job.facts


def _check_shards_dir(target: Path) -> None:
    """Refuse a `shards_dir` that holds anything but shards; raises UserError. An empty one is removed."""
    if not target.exists() or (target / shards.MANIFEST).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise UserError("--shards_dir = {target}, holds other files; give a new or an empty folder", target=target)
    if target.is_symlink() or os.path.ismount(target):
        raise UserError(
            "--shards_dir = {target}, is a link or a disk of its own, and shards are put in place whole; give a "
            "folder in it: {other_target}",
            target=target,
            other_target=target / "shards",
        )
    with writing("shards_dir", target):
        target.rmdir()


def _prepared(
    data: DataConfig, task: TaskProtocol, train: StoredSplit, validation: StoredSplit, cached: Path | None
) -> Prepared:
    """The result of two splits that suit each other; raises UserError where they do not."""
    train_manifest = train.manifest
    validation_manifest = validation.manifest
    if train_manifest.kind != validation_manifest.kind:
        raise UserError(
            "--validation_file = {root}, holds {kind} shards, but training reads {other_kind}; prepare both alike",
            root=validation_manifest.root,
            kind=validation_manifest.kind,
            other_kind=train_manifest.kind,
        )
    if train_manifest.label_names != validation_manifest.label_names:
        raise UserError(
            "--validation_file = {root}, has the labels {label_names}, and the training data "
            "{other_label_names}; prepare both with the same --labels",
            root=validation_manifest.root,
            label_names=listed(validation_manifest.label_names),
            other_label_names=listed(train_manifest.label_names),
        )
    counts: dict[str, int] = {}
    for prefix, split in {TRAIN: train, VALIDATION: validation}.items():
        split.manifest.files(split.name)
        counts |= {f"{prefix}_{name}": count for name, count in split.manifest.counts(split.name).items()}
    return Prepared(
        train.folder,
        validation.folder,
        train_manifest.root / TOKENIZER,
        task.name,
        counts,
        passed_over(data, task),
        train_manifest.label_names,
        train_manifest.label_counts(train.name),
        cached,
    )
