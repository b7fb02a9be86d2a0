"""The list that all answers come from: read and tokenized once, in a child process, and kept as a prefix tree under
`cache_dir`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from data.prepare.data_tokenizer import tokenizer_folder
from data.prepare.looking import child_bytes
from data.prepare.training_data import find_training_data
from data.sources.files import find, sources_fingerprint
from data.sources.lines import BadRows, decoded_lines
from data.sources.peek import about_rows
from data.sources.reading import head_of, read_rows, reading, reading_in_child
from data.sources.source import Source
from data.sources.typed import typed_lines
from data.tokenizers.tokenizer import Tokenizer
from model.decoding.answer_tree import AnswerTree
from model.formats.answering import ANSWERS_FILE
from settings.declared import Config, DataConfig, GenerateConfig, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, Need, counted, listed
from settings.needs import without_effect
from support.child_process import call
from support.language import join, say
from support.storage import NotMade, fingerprint, only_if_made, read_once_made, writing
from support.units import format_size
from training.saved_model import SavedModel

if TYPE_CHECKING:
    from data.batches.loader import StepLoader

TREE_FILE = "tree.npz"
FORMAT = 2  # raise it when the same list would give another tree
BATCH_LINES = 1024
SAMPLED_ANSWERS = 16 * BATCH_LINES  # first answers of a list, from which the size of its tree is estimated
ROWS_PER_BATCH = 64  # held-out rows compared with the list at a time


@dataclass(frozen=True)
class AnswerList:
    """A list that answers come from.

    Args:
        folder: holds the tree, and the list as `ANSWERS_FILE` where each answer is a line.
        settings: generation settings for these answers: long enough for the longest, and no length
            penalty unless the user set one.
    """

    tree: AnswerTree
    folder: Path
    settings: dict[str, Any]


def answer_sources(files: str | None, model: SavedModel | None) -> list[Source]:
    """The files of a list of answers.

    Args:
        files: the setting `answers`, files or the answers themselves; auto: the list in the model's folder, if it has
            one; None: no list.

    Raises:
        UserError: there is no such file.
    """
    path: str | Path | None = files
    if files == AUTO:
        path = None if model is None else model.answer_list
    if path is None:
        return []
    return typed_lines(str(path)) or find(str(path), "--answers")


def read_list(config: Config, sources: Sequence[Source], tokenizer_dir: Path) -> AnswerList:
    """Read and tokenize a list of answers, or open it where that was done before.

    Args:
        tokenizer_dir: folder of the tokenizer.
    Raises:
        UserError: the list cannot be used, or a flag contradicts it.
        DoesNotFit: the list is too large to be read.
    """
    generate = config.generate
    files = ", ".join(str(source.path) for source in sources)
    refuse(without_effect(config.with_saved({}, answers=files), ("answers",)))

    def make(path: Path) -> None:
        max_bytes = child_bytes(config.memory.memory_budget)
        with reading_in_child(files, max_bytes):
            call(_build, sources, config.data, tokenizer_dir, path, max_bytes=max_bytes)

    folder = _cache_folder(config.data, sources, Tokenizer.load(tokenizer_dir))
    tree = read_once_made(folder, make, _load_tree)
    if config.is_set("max_new_tokens") and generate.max_new_tokens < tree.longest:
        raise UserError(
            "--max_new_tokens = {max_new_tokens}, would cut answers of {files}, whose longest has {longest} "
            "tokens; omit it",
            max_new_tokens=generate.max_new_tokens,
            files=files,
            longest=tree.longest,
        )
    settings: dict[str, Any] = {"max_new_tokens": tree.longest}
    # Settings that need `answers` to be none have no effect with a list: their defaults stand in.
    for name, (_, member) in settings_by_name().items():
        if Need("answers", ("none",)) in member.metadata["needs"]:
            settings[name] = member.default
    if not config.is_set("length_penalty") and generate.length_penalty == GenerateConfig.length_penalty:
        settings["length_penalty"] = 0.0
    return AnswerList(tree, folder, settings)


def estimate_tree(config: Config, sources: Sequence[Source]) -> tuple[int, str]:
    """Bytes of the tree that a run with these settings will hold, and a note on it.

    Exact where the tree is in the cache; else scaled up from a tree of the first answers, which are read here.
    """
    tokenizer: Tokenizer | None = None
    with suppress(NotMade):
        data = find_training_data(config.data, config.train.is_finetune, only_if_made)
        kind = config.tokenizer.tokenizer_type
        tokenizer_dir = tokenizer_folder(config.data, kind, config.model.vocab_size, data, only_if_made)
        tokenizer = Tokenizer.load(tokenizer_dir)
        folder = _cache_folder(config.data, sources, tokenizer)
        tree = read_once_made(folder, lambda path: None, _load_tree, only_if_made)
        return tree.num_bytes, describe(tree, sources)
    first = list(islice(_answer_texts(sources, config.data), SAMPLED_ANSWERS))
    if not first:
        return 0, ""  # The run itself refuses an empty list.
    if tokenizer is not None:
        tree = AnswerTree.build(tokenizer.encode_prompts(first), tokenizer.eos_id)
    else:
        # No tokenizer yet: bytes stand in for its tokens, which are never more.
        tree = AnswerTree.build((np.frombuffer(text.encode(), np.uint8) for text in first), eos_id=256)
    count = len(first)
    if count == SAMPLED_ANSWERS:
        count = max(count, about_rows(sources))
    size = tree.num_bytes * count // len(first)
    text = "answers come from {file}: about {count}, {size} in memory"
    return size, say(text, file=_paths(sources), count=f"{count:,}", size=format_size(size))


def describe(tree: AnswerTree, sources: Sequence[Source]) -> str:
    """A note on a list of answers: its files, their number, the longest and its memory."""
    return say(
        "answers come from {file}: {count} of at most {longest} tokens, {size}",
        file=_paths(sources),
        count=f"{tree.num_answers:,}",
        longest=tree.longest,
        size=format_size(tree.num_bytes),
    )


def unlisted_note(tree: AnswerTree, loader: StepLoader, rows: int, subset: range | None = None) -> list[str]:
    """A note on references that are not in the list; empty where all are.

    Args:
        rows: how many of the first held-out rows are compared.
        subset: the rows of one validation set, to compare only these; None: all.
    """
    is_listed = [
        target[:length].tolist() in tree
        for batch in loader.evaluation_batches(rows, ROWS_PER_BATCH, rows=subset)
        for target, length in zip(batch.labels, batch.target_lengths, strict=True)
    ]
    count = is_listed.count(False)
    if not count:
        return []
    text = "{count} of {rows} have a reference that is not in the list of answers, so that no answer can match it"
    return [say(text, count=f"{count:,}", rows=counted(len(is_listed), "row"))]


def _paths(sources: Sequence[Source]) -> str:
    return join(", ", (str(source.path) for source in sources))


def _cache_folder(data: DataConfig, sources: Sequence[Source], tokenizer: Tokenizer) -> Path:
    facts = [FORMAT, sources_fingerprint(sources), data.response_column, tokenizer.fingerprint]
    return Path(data.cache_dir) / "answers" / fingerprint(facts)


def _load_tree(folder: Path) -> AnswerTree:
    return AnswerTree.load(folder / TREE_FILE)


def _build(sources: Sequence[Source], data: DataConfig, tokenizer_dir: Path, folder: Path) -> None:
    """Write the list and its tree into a new folder."""
    tokenizer = Tokenizer.load(tokenizer_dir)
    is_one_per_line = True

    def write_and_encode(file: TextIO) -> Iterator[NDArray[np.int32]]:
        nonlocal is_one_per_line
        texts = _answer_texts(sources, data)
        while batch := list(islice(texts, BATCH_LINES)):
            for text, ids in zip(batch, tokenizer.encode_prompts(batch), strict=True):
                if tokenizer.unk_id in ids:
                    raise UserError(
                        "--answers, the tokenizer has no token for a part of {text!r}, which no answer can contain; "
                        "leave it out",
                        text=text[:60],
                    )
                is_one_per_line &= text == text.strip() and not {"\n", "\r"} & {*text}
                file.write(f"{text}\n")
                yield ids

    with writing("cache_dir", data.cache_dir):
        folder.mkdir()
        try:
            with (folder / ANSWERS_FILE).open("w", encoding="utf8") as file:
                AnswerTree.build(write_and_encode(file), tokenizer.eos_id).save(folder / TREE_FILE)
        except ValueError as error:
            raise UserError("--answers = {path}, cannot be used: {error}", path=sources[0].path, error=error) from None
        if not is_one_per_line:  # Read again line by line, the file would give other answers.
            (folder / ANSWERS_FILE).unlink()


def _answer_texts(sources: Sequence[Source], data: DataConfig) -> Iterator[str]:
    """The answers that are not blank. Those of plain text, one a line, come without the blanks around them."""
    bad_rows = BadRows()
    for source in sources:
        names = head_of(source).all_names
        if not names:  # plain text
            with reading(source):
                yield from filter(None, (line.strip() for line in decoded_lines(source, bad_rows)))
            continue
        column = data.response_column
        if column not in names:
            column = names[0]
        if column != data.response_column and len(names) > 1:
            raise UserError(
                "--answers = {path}, has no column {response_column}; its columns: {names}; name one with "
                "--response_column",
                path=source.path,
                response_column=data.response_column,
                names=listed(names),
            )
        texts = (text for rows in read_rows([source], [column], bad_rows) for (text,) in rows)
        yield from filter(str.strip, texts)
