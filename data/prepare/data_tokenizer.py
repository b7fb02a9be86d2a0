"""The tokenizer of a run: the one that is named, or one that is trained on its data and kept under `cache_dir`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

from data.prepare.looking import tokenizer_limits
from data.prepare.training_data import TrainingData
from data.progress import ProgressLine
from data.sources.files import sources_fingerprint
from data.sources.lines import BadRows
from data.sources.peek import MOST_CHARS, peek
from data.sources.reading import read_rows
from data.text.proteins import PREFIXES, PROSTT5
from data.text.templates import FILE_NAME as TEMPLATE_FILE
from data.tokenizers.published import COMPANIONS
from data.tokenizers.tokenizer import Quality, Tokenizer, quality
from data.tokenizers.training import check_vocabulary, train_tokenizer
from formats import FASTA
from language import say
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO
from storage import MOST_TABLE_BYTES, Once, fingerprint, make_once, read_bytes, read_once_made, read_text

SAMPLE_BYTES = 64 * 2**20  # most text that a tokenizer is trained on, an even sample of the data
QUALITY_ROWS = 2**17  # of the beginning of each part, that a tokenizer is measured on
FORMAT = 3  # raise it when the same text would give another tokenizer


def tokenizer_type_of(config: Config, training_data: TrainingData) -> str:
    """Which kind of tokenizer is trained on the data."""
    if config.tokenizer.tokenizer_type != AUTO:
        return config.tokenizer.tokenizer_type
    if config.data.prepare_text != "none" or any(source.kind == FASTA for source in training_data.sources):
        return "letters"
    return training_data.task.tokenizer_type(training_data)


def tokenizer_folder(config: Config, training_data: TrainingData, once: Once = make_once) -> Path:
    """Give the folder of the tokenizer: the one named, or one trained on the training data and kept in the cache.

    Where it lacks some of `extra_tokens`, it is one that has them, kept in the cache too.

    Raises:
        UserError: the data or the tokens cannot be read, or the vocabulary is too small. NotMade: by `only_if_made`.
    """
    folder = _without_extra_tokens(config, training_data, once)
    if config.data.extra_tokens is None:
        return folder
    tokenizer = Tokenizer.load(folder)
    tokens = read_extra_tokens(config.data.extra_tokens)
    if all(tokenizer.token_to_id(token) is not None for token in tokens):
        return folder
    parent = folder if folder.is_dir() else folder.parent
    companions = [parent / name for name in (*COMPANIONS, TEMPLATE_FILE) if (parent / name).is_file()]
    digests = [sha256(read_bytes(path)).hexdigest() for path in companions]
    extended = Path(config.data.cache_dir) / f"tokenizer-{fingerprint([tokenizer.fingerprint, digests, tokens])}"
    return _in_cache(extended, lambda partial: tokenizer.save_extended(tokens, partial), once)


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


def _without_extra_tokens(config: Config, training_data: TrainingData, once: Once) -> Path:
    data = config.data
    if data.tokenizer_dir != AUTO:
        return Path(data.tokenizer_dir)
    kind = tokenizer_type_of(config, training_data)
    check_vocabulary(kind, config.model.vocab_size)
    facts = {
        "format": FORMAT,
        "sources": sources_fingerprint(training_data.sources),
        "columns": training_data.columns.sides(),
        "type": kind,
        "vocab_size": config.model.vocab_size,
        "max_samples": data.max_samples,
        "skip": data.skip_bad_rows,
    }
    if data.prepare_text == PROSTT5:
        facts["prepare"] = PROSTT5
    folder = Path(data.cache_dir) / f"tokenizer-{fingerprint(facts)}"
    return _in_cache(folder, lambda partial: train_data_tokenizer(config, training_data).save(partial), once)


def _in_cache(folder: Path, make: Callable[[Path], None], once: Once) -> Path:
    """The folder of a tokenizer in the cache, once it has been seen to load."""
    read_once_made(folder, make, Tokenizer.load, once)
    return folder


def train_data_tokenizer(config: Config, training_data: TrainingData) -> Tokenizer:
    """Train a tokenizer on the training data, in this process.

    Raises:
        UserError: the data cannot be read, or the vocabulary is too small.
    Memory:
        that of `looking.tokenizer_limits`.
    """
    examples = training_data.task.examples(config, training_data.columns, None)
    bad_rows = BadRows(config.data.skip_bad_rows)

    def texts() -> Iterator[str]:
        rows = chain.from_iterable(read_rows(training_data.sources, training_data.columns, bad_rows))
        with ProgressLine(say("reading for the tokenizer")) as progress:
            for row in islice(rows, config.data.max_samples):
                progress.add(1, sum(len(text.encode("utf8", "replace")) for text in row))
                yield from examples.texts(row)

    try:
        return train_tokenizer(
            texts(),
            tokenizer_type_of(config, training_data),
            config.model.vocab_size,
            SAMPLE_BYTES,
            f"--train_file = {','.join(training_data.parts)}",
            tokenizer_limits(config),
            config.data.cache_dir,
            PREFIXES if config.data.prepare_text == PROSTT5 else (),
        )
    except UserError as error:
        raise UserError(*map(bad_rows.explain, error.problems)) from None


def tokenizer_quality(config: Config, training_data: TrainingData, tokenizer: Tokenizer) -> dict[str, Quality]:
    """Measure a tokenizer on the beginning of each part of the training data.

    Returns:
        name of the part -> its quality; parts without text are left out.
    """
    qualities = {}
    examples = training_data.task.examples(config, training_data.columns, None)
    for number, name in enumerate(training_data.parts):
        sources = [source for source in training_data.sources if source.part == number]
        rows = peek(sources, training_data.columns, QUALITY_ROWS).rows
        measured = quality(tokenizer, first_chars(chain.from_iterable(map(examples.texts, rows)), MOST_CHARS))
        if measured.chars:
            qualities[name or "the built-in sample"] = measured
    return qualities


def first_chars(texts: Iterable[str], most: int) -> Iterator[str]:
    """Texts up to so many characters in all, the last one cut."""
    for text in texts:
        yield text[:most]
        most -= len(text)
        if most <= 0:
            return
