"""What is to be learnt, from which files and columns, and with which tokenizer, where the user left it `auto`?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from config import Config
from data.cache import Once, fingerprint, make_once
from data.corpus import SampleCorpus, build_sample_corpus
from data.encoding import limited
from data.lines import BadRows
from data.objectives import STREAM_OBJECTIVES
from data.reading import column_names, read_rows
from data.shards import PAIRS, STREAM, Manifest, is_shards
from data.sources import JSONL, Source, find, sources_fingerprint
from data.tokenizer import Tokenizer
from data.tokenizer_training import train_tokenizer
from settings import AUTO, UserError

TOKENIZER_FORMAT = 1  # raise it when the same text would give another tokenizer


@dataclass(frozen=True)
class Task:
    """What the user asks for, with `auto` decided.

    Args:
        objective: span, ul2, prefix or pairs.
        sources, columns: the text to train on; none where shards are given.
        shards: a shards folder, or one split of it.
    """

    objective: str
    sources: list[Source]
    columns: list[str]
    shards: Path | None = None

    @property
    def kind(self) -> str:
        """Which shards the objective reads: stream or pairs."""
        return STREAM if self.objective in STREAM_OBJECTIVES else PAIRS


def decide(config: Config, once: Once = make_once) -> Task:
    """Decide the objective and find the training data; the built-in sample if no file is named.

    Args:
        once: `make_once`, or `only_if_made` where nothing shall be made.
    Raises:
        UserError: a file is missing, empty or broken. NotMade: by `only_if_made`.
    """
    data = config.data
    asked = "pairs" if config.train.is_finetune else data.objective
    if data.train_file is None:
        return _sample_task("span" if asked == AUTO else asked, build_sample_corpus(data.cache_dir, once))
    if is_shards(data.train_file):
        return _shards_task(Path(data.train_file), asked)
    sources = find(data.train_file)
    pair = [data.prompt_column, data.response_column]
    objective = asked
    if asked == AUTO:
        objective = "pairs" if set(pair) <= set(column_names(sources[0], data.text_column)) else "span"
    return Task(objective, sources, pair if objective == "pairs" else [data.text_column])


def _sample_task(objective: str, sample: SampleCorpus) -> Task:
    if objective == "pairs":
        return Task(objective, [Source(sample.pairs, JSONL)], ["prompt", "response"])
    return Task(objective, [Source(sample.text, JSONL)], ["text"])


def _shards_task(path: Path, asked: str) -> Task:
    kind = Manifest.of(path).kind
    objective = ("pairs" if kind == PAIRS else "span") if asked == AUTO else asked
    task = Task(objective, [], [], path)
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
    facts = {
        "format": TOKENIZER_FORMAT, "sources": sources_fingerprint(task.sources), "columns": task.columns,
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
        a few times `--tokenizer_sample`.
    """
    rows = read_rows(task.sources, task.columns, BadRows(config.data.skip_bad_rows))
    texts = (text for batch in limited(rows, config.data.max_samples) for row in batch for text in row)
    settings = config.tokenizer
    return train_tokenizer(texts, settings.tokenizer_type, config.model.vocab_size, settings.tokenizer_sample)
