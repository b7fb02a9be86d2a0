"""What is to be learnt, from which files and columns, and with which tokenizer, where the user left it `auto`; and what is not read?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from config import Config, DataConfig
from data.batches.objectives import STREAM_OBJECTIVES
from data.prepare.looking import tokenizer_room
from data.progress import ProgressLine
from data.shards.store import PAIRS, PREFERENCES, STREAM, Manifest, is_shards
from data.sources.corpus import build_sample_corpus
from data.sources.files import (
    Listing,
    Source,
    detect,
    find,
    held_out,
    listing,
    numbered_parts,
    parts_of,
    set_names,
    sources_fingerprint,
)
from data.sources.layouts import Columns
from data.sources.lines import BadRows
from data.sources.peek import MOST_CHARS, peek
from data.sources.places import public
from data.sources.reading import CONVERSATIONS, head_of, read_rows, recognised_columns, what_it_teaches
from data.text.clean import Cleaning
from data.text.conversations import Examples
from data.text.templates import template_of
from data.tokenizers.tokenizer import Quality, Tokenizer, quality
from data.tokenizers.training import check_vocabulary, train_tokenizer
from formats import JSONL, TSV
from language import join, say
from settings.errors import UserError
from settings.fields import AUTO, counted, listed
from storage import Once, fingerprint, make_once

FLAG = "--validation_file"
QUALITY_ROWS = 2**17  # of the beginning of each part, that a tokenizer is measured on
Rows = list[tuple[str, str]]  # of a table
TOKENIZER_FORMAT = 3  # raise it when the same text would give another tokenizer


@dataclass(frozen=True)
class Task:
    """What the user asks for, with `auto` decided.

    Args:
        objective: span, ul2, prefix, pairs or preferences.
        sources, columns: the rows to train on; none where shards are given.
        shards: a shards folder, or one split of it.
        parts: what the user named, separated by commas; `Source.part` counts these.
    """

    objective: str
    sources: list[Source]
    columns: Columns
    shards: Path | None = None
    parts: Sequence[str] = ("",)

    @property
    def kind(self) -> str:
        """Which shards the objective reads: stream or pairs."""
        return kind_of(self.objective)


def kind_of(objective: str) -> str:
    """Which shards an objective reads."""
    return STREAM if objective in STREAM_OBJECTIVES else PREFERENCES if objective == PREFERENCES else PAIRS


def decide(config: Config, once: Once = make_once, flag: str = "--train_file") -> Task:
    """Decide the objective and find the training data; the built-in sample if no file is named.

    Args:
        once: `make_once`, or `only_if_made` where nothing shall be made. flag: by which the file was named.
    Raises:
        UserError: a file is missing, empty or broken. NotMade: by `only_if_made`.
    """
    data = config.data
    asked = "pairs" if config.train.is_finetune else data.objective
    if data.train_file is None:
        if asked == PREFERENCES:
            raise UserError(
                "--train_file = none, preferences need a file with columns prompt, chosen, rejected; give it"
            )
        sample = build_sample_corpus(data.cache_dir, once)
        if asked == PAIRS:
            return Task(asked, [Source(sample.pairs, JSONL)], Columns(("prompt", "response")))
        return Task("span" if asked == AUTO else asked, [Source(sample.text, JSONL)], Columns(("text",)))
    if is_shards(data.train_file):
        return _shards_task(data, asked)
    sources = find(data.train_file, flag)
    objective = _objective(data, sources[0]) if asked == AUTO else asked
    return Task(
        objective,
        sources,
        columns_of(data, kind_of(objective), sources),
        parts=[public(part) for part in parts_of(data.train_file)],
    )


def _objective(data: DataConfig, source: Source) -> str:
    """What the columns of a file are for: pairs, or text that is masked."""
    taught, _ = what_it_teaches(data, source)
    if taught == PREFERENCES:
        raise _for_dpo(data)
    return PAIRS if taught in (PAIRS, CONVERSATIONS) else "span"


def held_out_sources(data: DataConfig) -> list[Source]:
    """The files to validate with: those named, or those of the training folders whose names say so; none: rows are held out.

    Raises:
        UserError: a file is missing, empty or broken.
    """
    if data.validation_file is not None:
        names = set_names(data.validation_file)
        if is_shards(data.validation_file):
            return []
        if names and (prepared := [part for _, part in numbered_parts(data.validation_file, FLAG) if is_shards(part)]):
            raise UserError(
                f"{FLAG} = {data.validation_file}, {prepared[0]} is shards; sets with names are made of files of rows"
            )
        return find(data.validation_file, FLAG)
    return [] if data.train_file is None or is_shards(data.train_file) else held_out(data.train_file)


def file_problems(data: DataConfig) -> list[str]:
    """Find what is wrong with the data and the tokenizer that the settings name, before any row is read, for `UserError`."""
    problems = []
    for name in ("train_file", "validation_file"):
        spec = getattr(data, name)
        if spec and not is_shards(spec):
            try:
                find(spec, f"--{name}")
            except UserError as error:
                problems += error.problems
    if data.tokenizer_dir != AUTO:
        try:
            Tokenizer.load(data.tokenizer_dir)
        except UserError as error:
            problems += error.problems
    return problems


def _for_dpo(data: DataConfig) -> UserError:
    return UserError(
        f"--train_file = {data.train_file}, holds preferences, two answers a prompt; learn them with the dpo command, or one "
        f"alone with --is_finetune=True --response_column={data.chosen_column}, from text"
    )


def check_heeded(data: DataConfig, kind: str, columns: Columns | None) -> None:
    """Refuse settings that rows of this kind do not heed.

    Args:
        columns: of the rows; None: they are shards already.
    Raises:
        UserError: all of them at once.
    """
    turns = ("messages_column", "history_column")
    idle = {STREAM: ("prompt_template", "source_prefix", *turns), PREFERENCES: turns, PAIRS: ()}[kind]
    if kind == PAIRS and data.messages_column != AUTO:
        idle = ("history_column",)
    problems = [name for name in idle if getattr(data, name) not in (AUTO, None)]
    if data.expand_turns and columns is not None and (kind != PAIRS or columns.form == "plain"):
        problems.append("expand_turns")
    if problems:
        what = {STREAM: "text for pretraining", PAIRS: "these pairs"}.get(kind, "preferences")
        raise UserError(*(f"--{name} = {getattr(data, name)}, has no effect on {what}; omit it" for name in problems))


def columns_of(data: DataConfig, kind: str, sources: Sequence[Source]) -> Columns:
    """The columns that shards of a kind are made of.

    Args:
        sources: the first decides where the settings do not.
    """
    if kind == STREAM:
        return Columns((data.text_column,))
    if sources and (known := recognised_columns(data, kind, sources[0])) is not None:
        return known
    if kind == PREFERENCES:
        return Columns((data.prompt_column, data.chosen_column, data.rejected_column))
    return Columns((data.prompt_column, data.response_column), data.history_column or "")


def examples_of(config: Config, kind: str, columns: Columns, tokenizer_dir: Path | None) -> Examples:
    """How the rows of these columns become texts, by the settings.

    Args:
        tokenizer_dir: beside which a template may lie; None: prompts are not worded.
    Raises:
        UserError: the template is wrong.
    """
    chosen = config.cleaning
    cleaning = Cleaning(chosen.clean, chosen.min_chars, chosen.max_chars, chosen.min_letters, chosen.max_repetition)
    template = None if kind == STREAM or tokenizer_dir is None else template_of(config.data, tokenizer_dir)
    return Examples(cleaning, template, columns.form, config.data.expand_turns)


def _shards_task(data: DataConfig, asked: str) -> Task:
    path = Path(str(data.train_file))
    kind = Manifest.of(path).kind
    if kind == PREFERENCES != asked:
        raise _for_dpo(data)
    objective = ("span" if kind == STREAM else kind) if asked == AUTO else asked
    task = Task(objective, [], Columns(), path)
    if task.kind != kind:
        raise UserError(
            f"--train_file = {path}, holds {kind} shards, which {objective} does not read; prepare the text again"
        )
    return task


def tokenizer_folder(config: Config, task: Task, once: Once = make_once) -> Path:
    """Give the folder of the tokenizer: the one named, or one trained on the training data and kept in the cache.

    Raises:
        UserError: the data cannot be read, or the vocabulary is too small. NotMade: by `only_if_made`.
    """
    data = config.data
    if data.tokenizer_dir != AUTO:
        return Path(data.tokenizer_dir)
    check_vocabulary(config.tokenizer.tokenizer_type, config.model.vocab_size)
    facts = {
        "format": TOKENIZER_FORMAT, "sources": sources_fingerprint(task.sources), "columns": task.columns.sides(),
        "type": config.tokenizer.tokenizer_type, "vocab_size": config.model.vocab_size,
        "sample": config.tokenizer.tokenizer_sample, "max_samples": data.max_samples, "skip": data.skip_bad_rows,
    }  # fmt: skip
    folder = Path(data.cache_dir) / f"tokenizer-{fingerprint(facts)}"
    return once(folder, lambda partial: train_task_tokenizer(config, task).save(partial))


def train_task_tokenizer(config: Config, task: Task) -> Tokenizer:
    """Train a tokenizer on the training data, in this process.

    Raises:
        UserError: the data cannot be read, or the vocabulary is too small.
    Memory:
        that of `looking.tokenizer_room`.
    """
    examples = examples_of(config, task.kind, task.columns, None)

    def texts() -> Iterator[str]:
        rows = chain.from_iterable(read_rows(task.sources, task.columns, BadRows(config.data.skip_bad_rows)))
        with ProgressLine(say("reading for the tokenizer")) as progress:
            for row in islice(rows, config.data.max_samples):
                progress.add(1, sum(len(text.encode("utf8", "replace")) for text in row))
                yield from examples.texts(row)

    settings = config.tokenizer
    source = f"--train_file = {','.join(task.parts)}"
    return train_tokenizer(
        texts(), settings.tokenizer_type, config.model.vocab_size, settings.tokenizer_sample, source,
        tokenizer_room(config), config.data.cache_dir,
    )  # fmt: skip


def tokenizer_quality(config: Config, task: Task, tokenizer: Tokenizer) -> dict[str, Quality]:
    """Measure a tokenizer on the beginning of each part of the training data.

    Returns:
        name of the part -> its quality; parts without text are left out.
    """
    found = {}
    made = examples_of(config, task.kind, task.columns, None)
    for number, name in enumerate(task.parts):
        sources = [source for source in task.sources if source.part == number]
        rows = peek(sources, task.columns, QUALITY_ROWS).rows
        measured = quality(tokenizer, first_chars(chain.from_iterable(map(made.texts, rows)), MOST_CHARS))
        if measured.chars:
            found[name or "the built-in sample"] = measured
    return found


def first_chars(texts: Iterable[str], most: int) -> Iterator[str]:
    """Texts up to so many characters in all."""
    left = most
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def passed_over(config: Config, kind: str) -> Rows:
    """Files and columns of the data that are not read, and how files were taken, for a table; none where that cannot be told."""
    table: Rows = []
    for name in ("train_file", "validation_file"):
        spec = getattr(config.data, name)
        with suppress(UserError, OSError):
            if spec and not is_shards(spec):
                parts = [listing(part, f"--{name}") for _, part in numbered_parts(spec, f"--{name}")]
                holds_out = name == "train_file" and config.data.validation_file is None
                table += _of_files(parts, holds_out)
                firsts = [detect(part.taken[0], f"--{name}") for part in parts if part.taken]
                table += _of_columns(config, kind, firsts)
    return list(dict.fromkeys(table))


def _of_files(parts: Sequence[Listing], holds_out: bool) -> Rows:
    """What became of the files of folders whose names say something.

    Args:
        holds_out: whether those for validation are read.
    """
    taken, told_files = {file for part in parts for file in part.taken}, dict[str, list[str]]()
    for title, group, words in (
        ("not read", "descriptions", "{files} .json next to other data files, usually metadata, first {file}; give it too if it holds rows"),
        ("not read", "test", "{files} named as test data, first {file}"),
        ("not read", "others", "{files} whose names mention no split, first {file}"),
        ("held out" if holds_out else "not read", "validation", "{files} named as validation data, first {file}"),
        ("read too", "unheeded", "{files} named as validation or test data, because none is named train, first {file}"),
    ):  # fmt: skip
        found = [file for part in parts for file in getattr(part, group) if (file in taken) == (title == "read too")]
        if found:
            files = len(found) if group == "descriptions" else counted(len(found), "file")
            told_files.setdefault(title, []).append(say(words, files=files, file=found[0]))
    return [(say(title), join("; ", said)) for title, said in told_files.items()]


def _of_columns(config: Config, kind: str, firsts: Sequence[Source]) -> Rows:
    """Columns that are not used, of the first file of each part; and of TSV whether its cells are quoted."""
    columns, unused = columns_of(config.data, kind, firsts), dict[str, None]()
    for source in firsts:
        names = head_of(source).all_names
        unused |= dict.fromkeys(name for name in names if name not in columns.kinds(names))
    named = [name or say("a column without a name") for name in unused]  # as pandas writes its index
    table = [(say("not used"), listed(named))] if named else []
    quoted = [source.path for source in firsts if source.kind == TSV and head_of(source).is_quoted]
    told_quotes = "{file}: cells in quotes are read as in CSV"
    return [*table, *((say("quotes"), say(told_quotes, file=file)) for file in quoted)]
