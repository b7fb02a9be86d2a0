"""The objective, files, columns and tokenizer of a run where the user left them `auto`; and what is not read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

from data.batches.objectives import STREAM_OBJECTIVES
from data.prepare.looking import tokenizer_limits
from data.progress import ProgressLine
from data.shards.store import PAIRS, PREFERENCES, STREAM, Manifest, is_shards
from data.sources.corpus import build_sample_corpus
from data.sources.files import (
    Listing,
    Source,
    collected,
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
from data.text.conversations import ANSWERS, Examples
from data.text.labels import MOST_LABELS, in_order, is_fraction
from data.text.proteins import PREFIXES, PROSTT5
from data.text.templates import FILE_NAME as TEMPLATE_FILE
from data.text.templates import template_of
from data.tokenizers.published import COMPANIONS
from data.tokenizers.tokenizer import Quality, Tokenizer, quality
from data.tokenizers.training import check_vocabulary, train_tokenizer
from formats import FASTA, JSONL, TSV
from language import join, say
from settings.consistency import HEADS
from settings.declared import Config, DataConfig
from settings.errors import UserError
from settings.fields import AUTO, counted, listed
from storage import MOST_TABLE_BYTES, Once, fingerprint, make_once, read_bytes, read_once_made, read_text, write_text

FLAG = "--validation_file"
QUALITY_TEXTS = 64  # by which it is known whether texts are proteins
QUALITY_ROWS = 2**17  # of the beginning of each part, that a tokenizer is measured on
Rows = list[tuple[str, str]]  # of a table
TOKENIZER_FORMAT = 3  # raise it when the same text would give another tokenizer


@dataclass(frozen=True)
class Task:
    """What the user asks for, with `auto` decided.

    Args:
        objective: span, ul2, prefix, denoise, pairs, preferences, sequence or token.
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
        """Which shards the objective reads, a key of `data.shards.store.COLUMNS`."""
        if self.shards is not None:
            return Manifest.of(self.shards).kind
        return kind_of(self.objective)


def kind_of(objective: str) -> str:
    """Which shards an objective reads."""
    return STREAM if objective in STREAM_OBJECTIVES else objective if objective in (PREFERENCES, *HEADS) else PAIRS


def decide(config: Config, once: Once = make_once, flag: str = "--train_file") -> Task:
    """Decide the objective and find the training data; the built-in sample if no file is named.

    Args:
        once: `make_once`, or `only_if_made` where nothing shall be made. flag: by which the file was named.
    Raises:
        UserError: a file is missing, empty or broken. NotMade: by `only_if_made`.
    """
    data = config.data
    asked = "pairs" if config.train.is_finetune and data.objective not in HEADS else data.objective
    if data.train_file is None:
        if asked == PREFERENCES:
            raise UserError(
                say("--train_file = none, preferences need a file with columns prompt, chosen, rejected; give it")
            )
        if asked in HEADS:
            raise UserError(
                say("--train_file = none, --head={asked} needs texts with labels; give a file", asked=asked)
            )
        sample = build_sample_corpus(data.cache_dir, once)
        if asked == PAIRS:
            return Task(asked, [Source(sample.pairs, JSONL)], Columns(("prompt", "response")))
        return Task("span" if asked == AUTO else asked, [Source(sample.text, JSONL)], Columns(("text",)))
    if is_shards(data.train_file):
        return _shards_task(data, asked)
    sources = find(data.train_file, flag)
    objective = asked
    if asked == AUTO:
        taught, _ = what_it_teaches(data, sources[0])
        if taught == PREFERENCES:
            raise _for_dpo(data)
        objective = PAIRS if taught in (PAIRS, CONVERSATIONS) else "span"
    columns, parts = columns_of(data, kind_of(objective), sources), parts_of(data.train_file)
    return Task(objective, sources, columns, parts=[public(part) for part in parts])


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
                "{flag} = {validation_file}, {prepared} is shards; sets with names are made of files of rows",
                flag=FLAG,
                validation_file=data.validation_file,
                prepared=prepared[0],
            )
        return find(data.validation_file, FLAG)
    return [] if data.train_file is None or is_shards(data.train_file) else held_out(data.train_file)


def file_problems(data: DataConfig) -> list[str]:
    """Find what is wrong with the data and the tokenizer that the settings name, before any row is read, for `UserError`."""
    problems = list[str]()
    for name in ("train_file", "validation_file"):
        with collected(problems):
            if (spec := getattr(data, name)) and not is_shards(spec):
                find(spec, f"--{name}")
    with collected(problems):
        if data.tokenizer_dir != AUTO:
            Tokenizer.load(data.tokenizer_dir)
    return problems


def _for_dpo(data: DataConfig) -> UserError:
    return UserError(
        "--train_file = {train_file}, holds preferences, two answers a prompt; learn them with the dpo "
        "command, or one alone with --is_finetune=True --response_column={chosen_column}, from text",
        train_file=data.train_file,
        chosen_column=data.chosen_column,
    )


def check_heeded(data: DataConfig, task: Task) -> None:
    """Refuse settings that the rows of a task do not heed; raises UserError."""
    kind = task.kind
    turns = ("messages_column", "history_column")
    worded = ("prompt_template", "source_prefix")
    idle = {STREAM: (*worded, *turns), PREFERENCES: turns, PAIRS: ()}.get(kind, (*worded, *turns))
    if kind == PAIRS and data.messages_column != AUTO:
        idle = ("history_column",)
    problems = [name for name in idle if getattr(data, name) not in (AUTO, None)]
    if data.expand_turns and task.shards is None and (kind != PAIRS or task.columns.form in ("plain", ANSWERS)):
        problems.append("expand_turns")
    if data.prepare_text != "none" and kind in (PAIRS, PREFERENCES):
        problems.append("prepare_text")
    if problems:
        kinds = {
            STREAM: say("text for pretraining"),
            PAIRS: say("these pairs"),
            PREFERENCES: say("preferences"),
        }
        what = kinds.get(kind, say("texts with labels"))
        raise UserError(
            *(
                say(
                    "--{name} = {value}, has no effect on {what}; omit it",
                    name=name,
                    value=getattr(data, name),
                    what=what,
                )
                for name in problems
            )
        )


def columns_of(data: DataConfig, kind: str, sources: Sequence[Source]) -> Columns:
    """The columns that shards of a kind are made of.

    Args:
        sources: the first decides where the settings do not.
    """
    if kind == STREAM:
        return Columns((data.text_column,))
    if kind in HEADS:
        mask = "" if data.mask_column == AUTO else data.mask_column
        is_protein = data.prepare_text != "none"
        return Columns((data.text_column,), head=kind, label=data.label_column, mask=mask, is_protein=is_protein)
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
    template = None
    if kind in (PAIRS, PREFERENCES) and tokenizer_dir is not None:
        template = template_of(config.data, tokenizer_dir)
    return Examples(cleaning, template, columns.form, config.data.expand_turns, config.data.prepare_text)


def tokenizer_type_of(config: Config, task: Task) -> str:
    """Which kind of tokenizer is trained on the data."""
    if (asked := config.tokenizer.tokenizer_type) != AUTO:
        return asked
    if config.data.prepare_text != "none" or any(source.kind == FASTA for source in task.sources):
        return "letters"
    if task.kind not in HEADS:
        return "bpe"
    texts = [text for text, _ in peek(task.sources, task.columns, QUALITY_TEXTS).rows]
    return "letters" if texts and all(text.isalpha() and text.isupper() and text.isascii() for text in texts) else "bpe"


def label_names(config: Config, task: Task, once: Once = make_once) -> tuple[str, ...]:
    """The names of the labels that a head learns, in their order; () where they are numbers to be predicted.

    Raises:
        UserError: the data cannot be read, or its labels are not names. NotMade: by `only_if_made`.
    """
    if config.model.labels != AUTO:
        return config.model.label_names
    if task.shards is not None:
        return Manifest.of(task.shards).label_names
    facts = {
        "sources": sources_fingerprint(task.sources), "columns": task.columns.sides(), "head": task.kind,
        "max_samples": config.data.max_samples, "skip": config.data.skip_bad_rows,
    }  # fmt: skip
    folder = Path(config.data.cache_dir) / f"labels-{fingerprint(facts)}"

    def write(partial: Path) -> None:
        partial.mkdir()
        write_text(partial / "labels.json", json.dumps(_names_in(config, task), ensure_ascii=False) + "\n")

    return read_once_made(folder, write, _kept_labels, once)


def _kept_labels(folder: Path) -> tuple[str, ...]:
    names = json.loads(read_text(folder / "labels.json"))
    if not isinstance(names, list) or len(names) == 1 or not all(isinstance(name, str) for name in names):
        raise ValueError("no names of labels")
    return tuple(names)


def _names_in(config: Config, task: Task) -> list[str]:
    bad_rows = BadRows(config.data.skip_bad_rows)
    rows = chain.from_iterable(read_rows(task.sources, task.columns, bad_rows))
    found = set[str]()
    with ProgressLine(say("reading labels")) as progress:
        for text, told in islice(rows, config.data.max_samples):
            progress.add(1, len(text))
            found.update(label for label in json.loads(told) if label is not None)
            if len(found) > MOST_LABELS:
                told = "--labels = auto, column {label} has more than {most:,} labels, such as {found}; use --labels=regression for numbers"
                raise UserError(say(told, label=task.columns.label, most=MOST_LABELS, found=listed(sorted(found), 3)))
    if any(is_fraction(name) for name in found):
        told = (
            "--labels = auto, column {label} has numbers such as {found}; use --labels=regression, or name the classes"
        )
        raise UserError(say(told, label=task.columns.label, found=next(filter(is_fraction, sorted(found)))))
    if commas := [name for name in found if "," in name]:
        told = "--label_column = {label}, has the label {commas!r}; commas separate labels here: write it without"
        raise UserError(say(told, label=task.columns.label, commas=commas[0]))
    if len(found) < 2:
        told = "--label_column = {label}, has {labels}; a head needs two or more, or --labels=regression"
        problem = say(told, label=task.columns.label, labels=counted(len(found), "label"))
        raise UserError(bad_rows.explain(problem))
    return in_order(list(found))


def _shards_task(data: DataConfig, asked: str) -> Task:
    path = Path(str(data.train_file))
    kind = Manifest.of(path).kind
    if kind == PREFERENCES != asked:
        raise _for_dpo(data)
    if kind in HEADS and asked != kind:
        raise UserError(
            "--train_file = {path}, holds texts with labels for --head={kind}; name this head", path=path, kind=kind
        )
    teaches = "span" if kind == STREAM else kind
    objective = teaches if asked == AUTO else asked
    if kind_of(objective) != kind_of(teaches):
        raise UserError(
            "--train_file = {path}, holds {kind} shards, which {objective} does not read; prepare the text again",
            path=path,
            kind=kind,
            objective=objective,
        )
    return Task(objective, [], Columns(), path)


def tokenizer_folder(config: Config, task: Task, once: Once = make_once) -> Path:
    """Give the folder of the tokenizer: the one named, or one trained on the training data and kept in the cache; with
    `extra_tokens`, where it lacks some, one that has them, kept there too.

    Raises:
        UserError: the data or the tokens cannot be read, or the vocabulary is too small. NotMade: by `only_if_made`.
    """
    folder = _without_extra_tokens(config, task, once)
    if config.data.extra_tokens is None:
        return folder
    tokenizer, tokens = Tokenizer.load(folder), read_extra_tokens(config.data.extra_tokens)
    if all(tokenizer.token_to_id(token) is not None for token in tokens):
        return folder
    home = folder if folder.is_dir() else folder.parent
    beside = [read_bytes(home / name) for name in (*COMPANIONS, TEMPLATE_FILE) if (home / name).is_file()]
    facts = [tokenizer.fingerprint, [sha256(content).hexdigest() for content in beside], tokens]
    made = Path(config.data.cache_dir) / f"tokenizer-{fingerprint(facts)}"
    return _kept_tokenizer(made, lambda partial: tokenizer.save_extended(tokens, partial), once)


def read_extra_tokens(path: str) -> list[str]:
    """The tokens of `extra_tokens`, each once; blank lines are left out.

    Raises:
        UserError: the file cannot be read, or holds none.
    """
    try:
        lines = read_text(Path(path), MOST_TABLE_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(
            "--extra_tokens = {path}, cannot be read ({error}); give a text file with a token a line",
            path=path,
            error=error,
        ) from None
    if not (tokens := list(dict.fromkeys(filter(None, map(str.strip, lines))))):
        raise UserError("--extra_tokens = {path}, holds no tokens; give a text file with a token a line", path=path)
    return tokens


def _without_extra_tokens(config: Config, task: Task, once: Once) -> Path:
    data = config.data
    if data.tokenizer_dir != AUTO:
        return Path(data.tokenizer_dir)
    kind = tokenizer_type_of(config, task)
    check_vocabulary(kind, config.model.vocab_size)
    facts = {
        "format": TOKENIZER_FORMAT, "sources": sources_fingerprint(task.sources), "columns": task.columns.sides(),
        "type": kind, "vocab_size": config.model.vocab_size,
        "sample": config.tokenizer.tokenizer_sample, "max_samples": data.max_samples, "skip": data.skip_bad_rows,
        **({"prepare": PROSTT5} if data.prepare_text == PROSTT5 else {}),
    }  # fmt: skip
    folder = Path(data.cache_dir) / f"tokenizer-{fingerprint(facts)}"
    return _kept_tokenizer(folder, lambda partial: train_task_tokenizer(config, task).save(partial), once)


def _kept_tokenizer(folder: Path, make: Callable[[Path], None], once: Once) -> Path:
    """The folder of a tokenizer in the cache, once it has been seen to load."""
    read_once_made(folder, make, Tokenizer.load, once)
    return folder


def train_task_tokenizer(config: Config, task: Task) -> Tokenizer:
    """Train a tokenizer on the training data, in this process.

    Raises:
        UserError: the data cannot be read, or the vocabulary is too small.
    Memory:
        that of `looking.tokenizer_limits`.
    """
    kind = tokenizer_type_of(config, task)
    examples = examples_of(config, task.kind, task.columns, None)
    bad_rows = BadRows(config.data.skip_bad_rows)

    def texts() -> Iterator[str]:
        rows = chain.from_iterable(read_rows(task.sources, task.columns, bad_rows))
        with ProgressLine(say("reading for the tokenizer")) as progress:
            for row in islice(rows, config.data.max_samples):
                progress.add(1, sum(len(text.encode("utf8", "replace")) for text in row))
                yield from examples.texts(row)

    source = f"--train_file = {','.join(task.parts)}"
    added = PREFIXES if config.data.prepare_text == PROSTT5 else ()
    limits = tokenizer_limits(config)
    sample_bytes = config.tokenizer.tokenizer_sample
    try:
        return train_tokenizer(
            texts(), kind, config.model.vocab_size, sample_bytes, source, limits, config.data.cache_dir, added
        )
    except UserError as error:
        raise UserError(*map(bad_rows.explain, error.problems)) from None


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
    if columns.has_answers:
        several = "where {column} has several, the first is trained on and scores count the best"
        table.append((say("right answers"), say(several, column=columns.texts[1])))
    quoted = [source.path for source in firsts if source.kind == TSV and head_of(source).is_quoted]
    told_quotes = "{file}: cells in quotes are read as in CSV"
    return [*table, *((say("quotes"), say(told_quotes, file=file)) for file in quoted)]
