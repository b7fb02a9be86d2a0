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

from common.child_process import call
from common.language import join, say
from common.storage import NotMade, fingerprint, only_if_made, read_once_made, writing
from common.units import format_size
from data.prepare.data_tokenizer import tokenizer_folder
from data.prepare.looking import child_bytes
from data.prepare.training_data import find_training_data
from data.sources.files import find, sources_fingerprint
from data.sources.lines import BadRows, decoded_lines
from data.sources.peek import about_rows
from data.sources.reading import head_of, read_rows, reading, reading_in_child
from data.sources.source import Source
from data.tokenizers.tokenizer import Tokenizer
from model.decoding.answer_tree import AnswerTree
from model.formats.answering import ANSWERS_FILE
from settings.declared import Config, DataConfig, GenerateConfig, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, Need, counted, listed
from settings.needs import without_effect
from training.saved_model import SavedModel

if TYPE_CHECKING:
    from data.batches.loader import StepLoader

TREE_FILE = "tree.npz"
FORMAT = 2  # raise it when the same list would give another tree
BATCH_LINES = 1024
SAMPLED_ANSWERS = 16 * BATCH_LINES  # from which the memory of a list is foreseen
READ_ROWS = 64


@dataclass(frozen=True)
class AnswerList:
    """A list that answers come from.

    Args:
        folder: holds the tree, and the list as `ANSWERS_FILE` where each answer is a line.
        settings: those that suit the list: no answer is cut, and the most probable is the best.
    """

    tree: AnswerTree
    folder: Path
    settings: dict[str, Any]


def answer_sources(files: str | None, model: SavedModel | None) -> list[Source]:
    """The files of the list that the setting `answers` names; auto: the model's own.

    Raises:
        UserError: there is no such file.
    """
    path: str | Path | None = files
    if files == AUTO:
        path = None if model is None else model.answer_list
    return [] if path is None else find(str(path), "--answers")


def read_list(config: Config, sources: Sequence[Source], texts: Path) -> AnswerList:
    """Read and tokenize a list of answers, or open it where that was done before.

    Args:
        texts: folder of the tokenizer.
    Raises:
        UserError: the list cannot be used, or a flag contradicts it. DoesNotFit: it is too large to be read.
    """
    generate = config.generate
    files = ", ".join(str(source.path) for source in sources)
    refuse(without_effect(config.with_saved({}, answers=files), ("answers",)))

    def make(path: Path) -> None:
        most = child_bytes(config.memory.memory_budget)
        with reading_in_child(files, most):
            call(_build, sources, config.data, texts, path, max_bytes=most)

    folder = _folder_of(config.data, sources, Tokenizer.load(texts))
    tree = read_once_made(folder, make, _tree_in)
    if config.given("max_new_tokens") and generate.max_new_tokens < tree.longest:
        raise UserError(
            "--max_new_tokens = {max_new_tokens}, would cut answers of {files}, whose longest has {longest} "
            "tokens; omit it",
            max_new_tokens=generate.max_new_tokens,
            files=files,
            longest=tree.longest,
        )
    settings: dict[str, Any] = {"max_new_tokens": tree.longest}
    for name, (_, member) in settings_by_name().items():
        if Need("answers", ("none",)) in member.metadata["needs"]:
            settings[name] = member.default
    if not config.given("length_penalty") and generate.length_penalty == GenerateConfig.length_penalty:
        settings["length_penalty"] = 0.0
    return AnswerList(tree, folder, settings)


def foreseen_tree(config: Config, sources: Sequence[Source]) -> tuple[int, str]:
    """Bytes of the tree that a run of these settings will hold, and what is said of it; reads files.

    As it lies in the cache; else as many times the tree of the first answers as there are.
    """
    tokenizer: Tokenizer | None = None
    with suppress(NotMade):
        data = find_training_data(config.data, config.train.is_finetune, only_if_made)
        kind = config.tokenizer.tokenizer_type
        texts = tokenizer_folder(config.data, kind, config.model.vocab_size, data, only_if_made)
        tokenizer = Tokenizer.load(texts)
        folder = _folder_of(config.data, sources, tokenizer)
        tree = read_once_made(folder, lambda path: None, _tree_in, only_if_made)
        return tree.num_bytes, describe(tree, sources)
    first = list(islice(_texts(sources, config.data), SAMPLED_ANSWERS))
    if not first:
        return 0, ""  # The run will say so.
    if tokenizer is not None:
        tree = AnswerTree.build(tokenizer.encode_prompts(first), tokenizer.eos_id)
    else:  # No tokenizer makes more tokens than bytes.
        tree = AnswerTree.build((np.frombuffer(text.encode(), np.uint8) for text in first), eos_id=256)
    count = len(first)
    if count == SAMPLED_ANSWERS:
        count = max(count, about_rows(sources))
    size = tree.num_bytes * count // len(first)
    text = "answers come from {file}: about {count}, {size} in memory"
    return size, say(text, file=_names(sources), count=f"{count:,}", size=format_size(size))


def describe(tree: AnswerTree, sources: Sequence[Source]) -> str:
    """What is said of a list of answers."""
    return say(
        "answers come from {file}: {count} of at most {longest} tokens, {size}",
        file=_names(sources),
        count=f"{tree.num_answers:,}",
        longest=tree.longest,
        size=format_size(tree.num_bytes),
    )


def unlisted_note(tree: AnswerTree, loader: StepLoader, rows: int, of: range | None = None) -> list[str]:
    """What is said of references among the first held-out rows, or those of a set, that are not in the list; nothing
    where all are.
    """
    is_listed = [
        target[:length].tolist() in tree
        for batch in loader.evaluation_batches(rows, READ_ROWS, rows=of)
        for target, length in zip(batch.labels, batch.target_lengths, strict=True)
    ]
    count = is_listed.count(False)
    if not count:
        return []
    text = "{count} of {rows} have a reference that is not in the list of answers, which no answer matches"
    return [say(text, count=f"{count:,}", rows=counted(len(is_listed), "row"))]


def _names(sources: Sequence[Source]) -> str:
    return join(", ", (str(source.path) for source in sources))


def _folder_of(data: DataConfig, sources: Sequence[Source], tokenizer: Tokenizer) -> Path:
    facts = [FORMAT, sources_fingerprint(sources), data.response_column, tokenizer.fingerprint]
    return Path(data.cache_dir) / "answers" / fingerprint(facts)


def _tree_in(folder: Path) -> AnswerTree:
    return AnswerTree.load(folder / TREE_FILE)


def _build(sources: Sequence[Source], data: DataConfig, texts: Path, folder: Path) -> None:
    """Write the list and its tree into a new folder."""
    tokenizer = Tokenizer.load(texts)
    is_of_lines = True

    def answers(file: TextIO) -> Iterator[NDArray[np.int32]]:
        nonlocal is_of_lines
        answers = _texts(sources, data)
        while batch := list(islice(answers, BATCH_LINES)):
            for text, ids in zip(batch, tokenizer.encode_prompts(batch), strict=True):
                if tokenizer.unk_id in ids:
                    raise UserError(
                        "--answers, the tokenizer has no token for a part of {text!r}, which no answer can contain; "
                        "leave it out",
                        text=text[:60],
                    )
                is_of_lines &= text == text.strip() and not {"\n", "\r"} & {*text}
                file.write(f"{text}\n")
                yield ids

    with writing("cache_dir", data.cache_dir):
        folder.mkdir()
        try:
            with (folder / ANSWERS_FILE).open("w", encoding="utf8") as file:
                AnswerTree.build(answers(file), tokenizer.eos_id).save(folder / TREE_FILE)
        except ValueError as error:
            raise UserError("--answers = {path}, cannot be used: {error}", path=sources[0].path, error=error) from None
        if not is_of_lines:  # Read again as lines, they would be other answers.
            (folder / ANSWERS_FILE).unlink()


def _texts(sources: Sequence[Source], data: DataConfig) -> Iterator[str]:
    """The answers as texts, without blank ones; of files of lines each without the blanks around it."""
    bad_rows = BadRows()
    for source in sources:
        names = head_of(source).all_names
        if not names:
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
