"""The tokenizer of a run: the one that is named, or one that is trained on its data and kept under `cache_dir`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

from data.prepare.training_data import TrainingData
from data.progress import ProgressLine, text_bytes
from data.sources.files import sources_fingerprint
from data.sources.formats import FASTA
from data.sources.lines import BadRows, up_to
from data.sources.peek import MOST_CHARS, peek
from data.sources.reading import read_rows
from data.text.conversations import TextRow
from data.text.proteins import PREFIXES, PROSTT5
from data.text.templates import FILE_NAME as TEMPLATE_FILE
from data.tokenizers.published import COMPANIONS
from data.tokenizers.sample import SMALL, TrainingLimits
from data.tokenizers.tokenizer import Quality, Tokenizer, quality
from data.tokenizers.training import check_vocabulary, train_tokenizer
from settings.declared import DataConfig
from settings.errors import UserError
from settings.fields import AUTO, Auto
from support.language import say
from support.storage import MOST_TABLE_BYTES, Once, fingerprint, make_once, read_bytes, read_once_made, read_text

SAMPLE_BYTES = 64 * 2**20  # A tokenizer is trained on an even sample of the data, of so much text at most.
QUALITY_ROWS = 2**17  # A tokenizer is measured on the first rows of each part.
FORMAT = 3  # Raise it when the same text would give another tokenizer.


def tokenizer_type_of(data: DataConfig, tokenizer_type: str | Auto, training_data: TrainingData) -> str:
    """Which kind of tokenizer is trained on the data."""
    if tokenizer_type != AUTO:
        return tokenizer_type
    if data.prepare_text != "none" or FASTA in [source.kind for source in training_data.sources]:
        return "letters"
    return training_data.task.tokenizer_type(training_data)


def tokenizer_folder(
    data: DataConfig,
    tokenizer_type: str | Auto,
    vocab_size: int,
    training_data: TrainingData,
    once: Once = make_once,
    limits: TrainingLimits = SMALL,
) -> Path:
    """Give the folder of the tokenizer: the one named, or one trained on the training data and kept in the cache.

    Where it lacks some of `extra_tokens`, it is one that has them, kept in the cache too.

    Args:
        tokenizer_type, vocab_size, limits: of one that is trained.
    Raises:
        UserError: the data or the tokens cannot be read, or the vocabulary is too small. NotMade: by `only_if_made`.
    """
    folder = Path(data.tokenizer_dir)
    if data.tokenizer_dir == AUTO:
        kind = tokenizer_type_of(data, tokenizer_type, training_data)
        check_vocabulary(kind, vocab_size)
        facts = {
            "format": FORMAT,
            "sources": sources_fingerprint(training_data.sources),
            "columns": training_data.columns.sides(),
            "type": kind,
            "vocab_size": vocab_size,
            "max_samples": data.max_samples,
            "skip": data.skip_bad_rows,
        }
        if data.prepare_text == PROSTT5:
            facts["prepare"] = PROSTT5

        def make(unfinished: Path) -> None:
            train_data_tokenizer(data, kind, vocab_size, training_data, limits).save(unfinished)

        folder = Path(data.cache_dir) / f"tokenizer-{fingerprint(facts)}"
        read_once_made(folder, make, Tokenizer.load, once)
    if data.extra_tokens is None:
        return folder
    tokenizer = Tokenizer.load(folder)
    tokens = read_extra_tokens(data.extra_tokens)
    if not missing_tokens(tokenizer, tokens):
        return folder
    parent = folder if folder.is_dir() else folder.parent
    companions = filter(Path.is_file, [parent / name for name in (*COMPANIONS, TEMPLATE_FILE)])
    digests = [sha256(read_bytes(path)).hexdigest() for path in companions]
    extended = Path(data.cache_dir) / f"tokenizer-{fingerprint([tokenizer.fingerprint, digests, tokens])}"
    read_once_made(extended, partial(tokenizer.save_extended, tokens), Tokenizer.load, once)
    return extended


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
    tokens = list(dict.fromkeys(filter(None, map(str.strip, lines))))
    if not tokens:
        raise UserError(
            "--extra_tokens = {path}, contains no tokens; give a text file with one token per line", path=path
        )
    return tokens


def missing_tokens(tokenizer: Tokenizer, tokens: Iterable[str]) -> list[str]:
    """Those of some tokens that a tokenizer does not have."""
    return [token for token in tokens if tokenizer.token_to_id(token) is None]


def train_data_tokenizer(
    data: DataConfig, kind: str, vocab_size: int, training_data: TrainingData, limits: TrainingLimits = SMALL
) -> Tokenizer:
    """Train a tokenizer on the training data, in this process.

    Args:
        kind: of `tokenizer_type_of`.
    Raises:
        UserError: the data cannot be read, or the vocabulary is too small.
    Memory:
        that of the limits.
    """
    bad_rows = BadRows(data.skip_bad_rows)

    def rows() -> Iterator[TextRow]:
        all_rows = chain.from_iterable(read_rows(training_data.sources, training_data.columns, bad_rows))
        with ProgressLine(say("reading for the tokenizer")) as progress:
            for row in islice(all_rows, data.max_samples):
                progress.add(1, text_bytes([row]))
                yield row

    with explained(bad_rows):
        return train_tokenizer(
            texts_of(data, training_data, rows()),
            kind,
            vocab_size,
            SAMPLE_BYTES,
            f"--train_file = {','.join(training_data.parts)}",
            limits,
            data.cache_dir,
            PREFIXES if data.prepare_text == PROSTT5 else (),
        )


@contextmanager
def explained(bad_rows: BadRows) -> Iterator[None]:
    """A context that adds to a UserError the first broken row that was passed over, which may be its cause."""
    try:
        yield
    except UserError as error:
        raise UserError(*map(bad_rows.explain, error.problems)) from None


def texts_of(data: DataConfig, training_data: TrainingData, rows: Iterable[TextRow]) -> Iterator[str]:
    """The texts in rows of the training data, as they were read."""
    examples = training_data.task.examples(data, False, training_data.columns, None)
    return chain.from_iterable(map(examples.texts, rows))


def tokenizer_quality(data: DataConfig, training_data: TrainingData, tokenizer: Tokenizer) -> dict[str, Quality]:
    """Measure a tokenizer on the beginning of each part of the training data.

    Returns:
        name of the part -> its quality; parts without text are left out.
    """
    qualities = {}
    for number, name in enumerate(training_data.parts):
        sources = [source for source in training_data.sources if source.part == number]
        rows = peek(sources, training_data.columns, QUALITY_ROWS).rows
        measured = quality(tokenizer, up_to(texts_of(data, training_data, rows), MOST_CHARS, len))
        if measured.chars:
            qualities[name or "the built-in sample"] = measured
    return qualities
