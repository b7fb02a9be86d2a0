"""Text to token shards, once for all runs.

`prepare` decides what is trained, finds or trains the tokenizer, reads the rows, encodes them and writes shards under the
cache folder, named by a fingerprint of everything that shapes them: files, columns, tokenizer, lengths, settings. The
same question a second time is answered at once; an attempt that was killed or interrupted continues after its last shard.
Reading and encoding take memory that training wants, so `prepare_in_child` lets another process do it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.batches.mixture import named_weights
from data.prepare.data_tokenizer import read_extra_tokens, tokenizer_folder
from data.prepare.looking import ask, forget, names_files, workers
from data.prepare.training_data import (
    TrainingData,
    check_heeded,
    file_problems,
    find_training_data,
    held_out_sources,
)
from data.prepare.unread import passed_over
from data.prepare.writing import Job, Writing, clear
from data.progress import noted_in
from data.shards import store as shards
from data.shards.store import TOKENIZER, TRAIN, VALIDATION, Manifest, is_shards
from data.sources.files import set_names, source_facts, sources_fingerprint
from data.sources.source import Source
from data.task import Table, Task
from data.text.templates import Template, template_of
from data.tokenizers.tokenizer import Tokenizer
from language import say
from settings.declared import Config, DataConfig
from settings.errors import UserError, refuse
from settings.fields import AUTO, at_home, listed
from settings.tasks import task_named
from storage import (
    NotMade,
    Once,
    fingerprint,
    make_once,
    only_if_made,
    read_bytes,
    read_once_made,
    remove,
    remove_damaged,
    sync,
    write_text,
    writing,
)

FORMAT = 5  # raise it when the same text would give other shards
IDENTITY = "identity"


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
    """

    train_dir: Path
    validation_dir: Path
    tokenizer_dir: Path
    objective: str
    counts: dict[str, int]
    unread: Table
    labels: tuple[str, ...] = ()
    label_counts: tuple[int, ...] = ()

    @property
    def task(self) -> Task:
        """The task of the objective."""
        task: Task = task_named(self.objective)
        return task


def prepare(config: Config, note: Path | None = None, once: Once = make_once) -> Prepared:
    """Give shards for these settings: given ones, those of the cache, or new ones.

    Args:
        note: file that says how far it is, while it goes on; None: none.
    Raises:
        UserError: the data, the tokenizer or a folder is not usable. NotMade: by `only_if_made`.
    Memory:
        that of `data.prepare.looking` at any size of the data, at most 1 GiB.
    """
    with _all_cores(config), noted_in(note):
        return _prepare(config, once)


def prepare_evaluation(config: Config, note: Path | None = None, once: Once = make_once) -> Prepared:
    """Give shards with all rows of `validation_file` for evaluation alone; without one, those that `prepare` holds out.

    Returns:
        `validation_dir` holds the rows; `train_dir` is the same folder if there is a `validation_file`.
    Raises:
        as `prepare`.
    """
    if config.data.validation_file is None:
        return prepare(config, note, once)
    data = replace(config.data, train_file=config.data.validation_file, validation_file=None)
    alone = replace(config, data=data)
    with _all_cores(config), noted_in(note):
        rows = find_training_data(alone, once, "--validation_file")
        if rows.shards is not None:
            split = _given_split(rows.shards, VALIDATION)
        else:
            rows = _with_label_names(alone, rows, once)
            folder = tokenizer_folder(alone, rows, once)
            sets = set_names(config.data.validation_file)
            split = StoredSplit(_make_shards(alone, rows, folder, [], rows.sources, once, sets=sets), VALIDATION)
        return _prepared(config, rows, split, split)


def find_prepared(config: Config) -> Prepared | None:
    """Look for finished shards; None if something has to be made first.

    Raises:
        UserError: as `prepare`.
    """
    try:
        return prepare(config, once=only_if_made)
    except NotMade:
        return None


def in_child(function: Callable[..., Prepared], config: Config, note: Path | None = None) -> Prepared:
    """Do what `prepare` or `prepare_evaluation` does, in a process of its own if files are named or something has to be made.

    Raises:
        UserError: as they do. DoesNotFit: it takes more than the budget leaves.
    """
    try:
        if not names_files(config):
            with suppress(NotMade):
                return function(config, note, only_if_made)
        return ask(config, function, config, note)
    except KeyboardInterrupt:
        words = "interrupted while preparing data; the same command continues where it stopped"
        raise KeyboardInterrupt(say(words)) from None
    finally:
        forget()


def checked_in_child(
    function: Callable[..., Prepared], config: Config, splits: Sequence[str], note: Path | None = None
) -> Prepared:
    """Do what `in_child` does, and compare the shards with their checksums; damaged ones of the cache are made anew.

    Args:
        splits: whose rows will be read, `train`, `validation` or both.
    Raises:
        UserError: also where shards that the user has named are damaged.
    """
    prepared = in_child(function, config, note)
    folders = {TRAIN: prepared.train_dir, VALIDATION: prepared.validation_dir}
    read = [folders[split] for split in splits]
    try:
        shards.check_shards(*read)
        return prepared
    except UserError:
        of_cache = [folder for folder in read if _is_of_cache(config, folder.parent)]
        if not of_cache:
            raise
    for root in dict.fromkeys(folder.parent for folder in of_cache):
        own = [folder.name for folder in of_cache if folder.parent == root]
        remove_damaged(root, partial(_check_splits, own))
    prepared = in_child(function, config, note)
    shards.check_shards(*read)
    return prepared


def _check_splits(names: Sequence[str], root: Path) -> None:
    shards.check_shards(*(root / name for name in names))


def _is_of_cache(config: Config, root: Path) -> bool:
    """Whether shards were made under the cache folder, and no setting names them."""
    if config.prepare.shards_dir != AUTO or root.parent.resolve() != Path(config.data.cache_dir).resolve():
        return False
    specs = [spec for spec in (config.data.train_file, config.data.validation_file) if spec and is_shards(spec)]
    return root.resolve() not in [Manifest.of(Path(str(spec))).root.resolve() for spec in specs]


@contextmanager
def _all_cores(config: Config) -> Iterator[None]:
    """Let the tokenizers library use its threads while preparing."""
    name, before = "TOKENIZERS_PARALLELISM", os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ[name] = "true"
    if config.run.num_threads != AUTO:
        os.environ.setdefault("RAYON_NUM_THREADS", str(config.run.num_threads))
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _prepare(config: Config, once: Once) -> Prepared:
    data = config.data
    validation_file = data.validation_file
    try:
        training_data = find_training_data(config, once)
        if data.mixture_weights is not None and training_data.shards is None:  # Of shards their loader reads the parts.
            named_weights(data.mixture_weights, training_data.parts)
        validation = held_out_sources(data)
        sets = set_names(validation_file)
        given = _given_split(validation_file, VALIDATION) if validation_file and is_shards(validation_file) else None
    except UserError as error:  # Of all that is named, what is missing is told at once.
        raise UserError(*error.problems, *file_problems(data)) from None
    training_data = _with_label_names(config, training_data, once)
    check_heeded(config, training_data)
    if training_data.shards is None:
        tokenizer_dir = tokenizer_folder(config, training_data, once)
        made = _make_shards(
            config, training_data, tokenizer_dir, training_data.sources, validation, once, given is None, sets
        )
        train = StoredSplit(made, TRAIN)
    else:
        train = _given_split(training_data.shards, TRAIN)
        made = train.manifest
        tokenizer_dir = made.root / TOKENIZER
        _refuse_changes(config, validation)
        if data.tokenizer_dir != AUTO:
            _check_same_tokenizer(made, tokenizer_folder(config, training_data, once))
        _check_same_template(data, training_data.task, made, tokenizer_dir)
        _check_extra_tokens(data.extra_tokens, tokenizer_dir)
        if validation:
            made = _make_shards(config, training_data, tokenizer_dir, [], validation, once, sets=sets)
    if given is not None:
        _check_same_tokenizer(given.manifest, train.manifest.root / TOKENIZER)
        _check_same_template(data, training_data.task, given.manifest, train.manifest.root / TOKENIZER)
    return _prepared(config, training_data, train, given or StoredSplit(made, VALIDATION))


def _with_label_names(config: Config, training_data: TrainingData, once: Once) -> TrainingData:
    names = training_data.task.label_names(config, training_data, once)
    return replace(training_data, columns=replace(training_data.columns, names=names))


def _refuse_changes(config: Config, raw: Sequence[Source]) -> None:
    """Refuse flags that would change shards, which are used as they are.

    Args:
        raw: the validation data where they are text, which cleaning is for.
    """
    if config.data.max_samples is not None:
        raise UserError(
            "--max_samples = {max_samples}, shards are used whole; prepare the text with --max_samples",
            max_samples=config.data.max_samples,
        )
    cleaning = {"clean": config.cleaning.clean, "dedup": config.cleaning.dedup != "none"}
    idle = [name for name, is_on in cleaning.items() if is_on and config.origin(name) == "flag"]
    if not raw:
        refuse(
            [say("--{name}, shards are used as they are; prepare the text with --{name}", name=name) for name in idle]
        )


def _given_split(path: str | Path, name: str) -> StoredSplit:
    """Read a path as one split of a shards folder; of a whole folder it is the one of this name, or its first."""
    manifest = Manifest.of(Path(path))
    if manifest.root != Path(path):
        return StoredSplit(manifest, Path(path).name)
    names = list(manifest.content["splits"])
    return StoredSplit(manifest, name if name in names else names[0])


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
    tokenizer = Tokenizer.load(folder)
    tokens = [] if extra_tokens is None else read_extra_tokens(extra_tokens)
    if missing := [token for token in tokens if tokenizer.token_to_id(token) is None]:
        raise UserError(
            "--extra_tokens = {extra_tokens}, the shards were written without {missing}; prepare the text again "
            "with the same --extra_tokens",
            extra_tokens=extra_tokens,
            missing=listed(missing),
        )


def _check_same_template(data: DataConfig, task: Task, manifest: Manifest, beside: Path) -> None:
    """Refuse shards whose prompts another template has worded than the one asked for, or that lies elsewhere."""
    written = Template.read(manifest.root / TOKENIZER) or Template()
    if task.words_prompts and template_of(data, beside) != written:
        raise UserError(
            "{root}: was written with --prompt_template={name!r} and --source_prefix={prefix!r}; use the same "
            "for all, or prepare the text again",
            root=manifest.root,
            name=written.name,
            prefix=written.prefix,
        )


def _make_shards(
    config: Config,
    training_data: TrainingData,
    tokenizer_dir: Path,
    train: Sequence[Source],
    validation: Sequence[Source],
    once: Once,
    wants_validation: bool = True,
    sets: Sequence[str] = (),
) -> Manifest:
    data = config.data
    task = training_data.task
    tokenizer = Tokenizer.load(tokenizer_dir)
    if task.needs_sentinels and not tokenizer.num_sentinels:
        raise UserError(
            "--tokenizer_dir = {tokenizer_dir}, has no sentinels <extra_id_0> ..., which {objective} needs",
            tokenizer_dir=tokenizer_dir,
            objective=task.name,
        )
    columns = training_data.columns
    if training_data.shards is not None:
        columns = replace(task.columns_of(data, validation), names=columns.names)
    examples = task.examples(config, columns, tokenizer_dir)
    tokenizer.template = replace(examples.template or tokenizer.template, turns=columns.has_turns)
    job = Job(
        task=task,
        columns=columns,
        train=train,
        validation=validation,
        hold_out=wants_validation and not validation,
        limits=task.limits(data),
        max_samples=data.max_samples,
        skip_bad_rows=data.skip_bad_rows,
        parts=training_data.parts,
        sets=sets,
        examples=examples,
        dedup=config.cleaning.dedup,
    )
    settings = _settings(job) | task.shard_facts(data, columns)
    identity = fingerprint([settings, tokenizer.fingerprint])
    target = Path(data.cache_dir) / f"shards-{identity}"
    if config.prepare.shards_dir != AUTO:
        target = Path(at_home(config.prepare.shards_dir))
        _check_free(target, identity)

    def write(folder: Path) -> None:
        if not _is_written(folder, identity):
            _keep_own(folder, identity)
            progress = Writing(job, folder, tokenizer.size)
            size = sum(source.path.stat().st_size for source in (*train, *validation))
            splits = progress.run(tokenizer_dir, workers(config, size))
            tokenizer.save(folder / TOKENIZER)
            content = {
                "format": shards.FORMAT,
                "kind": task.shards.kind,
                "fingerprint": identity,
                "settings": settings,
                "sources": {TRAIN: source_facts(train), VALIDATION: source_facts(validation)},
                # So that training need not load the tokenizer:
                "tokenizer": {
                    "fingerprint": tokenizer.fingerprint,
                    "size": tokenizer.size,
                    "pad_id": tokenizer.pad_id,
                    "eos_id": tokenizer.eos_id,
                    "sentinel_ids": list(tokenizer.sentinel_ids),
                },
                "splits": splits,
                "dropped": progress.dropped.reasons,
                "labels": list(columns.names or ()),
                "label_counts": {name: split.label_counts for name, split in progress.splits.items()},
            }
            sync(folder / TOKENIZER)
            write_text(folder / shards.MANIFEST, json.dumps(content, indent=1) + "\n")
        clear(folder)
        (folder / IDENTITY).unlink(missing_ok=True)

    if config.prepare.shards_dir == AUTO:
        return read_once_made(target, write, lambda folder: _kept_shards(folder, identity), once, resumable=True)
    made = Manifest.read(once(target, write, resumable=True, flag="shards_dir"))
    if made.content["fingerprint"] != identity:  # Another process has made that folder meanwhile.
        raise UserError(_of_others(target))
    return made


def _kept_shards(folder: Path, identity: str) -> Manifest:
    """The manifest of shards in the cache; of their rows nothing is read, see `checked_in_child`.

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


def _is_written(folder: Path, identity: str) -> bool:
    """Whether an earlier attempt at the very same job was interrupted behind its last file, the manifest."""
    try:
        return bool(Manifest.read(folder).content["fingerprint"] == identity)
    except UserError:  # it is missing or damaged, and written anew
        return False


def _keep_own(folder: Path, identity: str) -> None:
    """Keep what an earlier attempt at the very same job left, and nothing else."""
    marker = folder / IDENTITY
    if not marker.is_file() or read_bytes(marker) != identity.encode():
        remove(folder)
        folder.mkdir()
        write_text(marker, identity)


def _settings(job: Job) -> dict[str, object]:
    """What shapes the shards of any task, but for the tokenizer."""
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
    if job.sets:
        facts["validation_sets"] = list(job.sets)
    if job.examples.template not in (None, Template()):
        facts |= job.examples.template.facts()
    if job.examples.each_turn and job.columns.form != "plain":
        facts["expand_turns"] = True
    return facts


def _of_others(target: Path) -> str:
    return say(
        "--shards_dir = {target}, holds shards of other data or settings; choose another folder or delete it",
        target=target,
    )


def _check_free(target: Path, identity: str) -> None:
    """A folder that the user names may be new, empty, or hold these very shards."""
    if (target / shards.MANIFEST).is_file():
        if Manifest.read(target).content["fingerprint"] != identity:
            raise UserError(_of_others(target))
    elif target.is_dir() and not any(target.iterdir()):
        if target.is_symlink() or os.path.ismount(target):
            raise UserError(
                "--shards_dir = {target}, is a link or a disk of its own, and shards are put in place whole; give a "
                "folder in it: {other_target}",
                target=target,
                other_target=target / "shards",
            )
        with writing("shards_dir", target):
            target.rmdir()
    elif target.exists():
        raise UserError("--shards_dir = {target}, holds other files; give a new or an empty folder", target=target)


def _prepared(config: Config, training_data: TrainingData, train: StoredSplit, validation: StoredSplit) -> Prepared:
    trained = train.manifest
    validated = validation.manifest
    if trained.kind != validated.kind:
        raise UserError(
            "--validation_file = {root}, holds {kind} shards, but training reads {other_kind}; prepare both alike",
            root=validated.root,
            kind=validated.kind,
            other_kind=trained.kind,
        )
    if trained.label_names != validated.label_names:
        raise UserError(
            "--validation_file = {root}, has the labels {label_names}, and the training data "
            "{other_label_names}; prepare both with the same --labels",
            root=validated.root,
            label_names=listed(validated.label_names),
            other_label_names=listed(trained.label_names),
        )
    counts: dict[str, int] = {}
    for prefix, split in ((TRAIN, train), (VALIDATION, validation)):
        split.manifest.files(split.name)
        counts |= {f"{prefix}_{name}": count for name, count in split.manifest.counts(split.name).items()}
    return Prepared(
        train.folder,
        validation.folder,
        trained.root / TOKENIZER,
        training_data.objective,
        counts,
        passed_over(config, training_data.task),
        trained.label_names,
        trained.label_counts(train.name),
    )
