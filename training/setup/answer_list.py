"""The list that all answers come from: read and tokenized once, in a child process, and kept as a prefix tree under `cache_dir`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from childproc import CRASHED, MEMORY, ChildDied, call
from data.prepare.data_tokenizer import tokenizer_folder
from data.prepare.looking import child_bytes, look
from data.prepare.training_data import find_training_data
from data.sources.files import find, sources_fingerprint
from data.sources.lines import BadRows, decoded_lines
from data.sources.peek import about_rows
from data.sources.reading import head_of, read_rows, reading
from data.sources.source import Source
from data.tokenizers.tokenizer import Tokenizer
from formats import TEXT
from language import join, say
from model.decoding.answer_tree import AnswerTree
from model.formats.answering import ANSWERS_FILE
from settings.declared import (
    Config,
    DataConfig,
    GenerateConfig,
    T5ModelConfig,
    TokenizerConfig,
    settings_by_name,
)
from settings.errors import DoesNotFit, UserError, refuse
from settings.fields import AUTO, Need, counted, listed
from settings.needs import without_effect
from settings.tasks import MODEL_HEADS
from storage import NotMade, fingerprint, only_if_made, read_once_made, writing
from training.processes.launch import rank
from training.report.progress import Progress
from training.saved_model import SavedModel
from units import format_size

if TYPE_CHECKING:
    from data.batches.loader import StepLoader

TREE_FILE = "tree.npz"
FORMAT = 2  # raise it when the same list would give another tree
BATCH_LINES = 1024
SAMPLED_ANSWERS = 16 * BATCH_LINES  # from which the memory of a list is foreseen
READ_ROWS = 64


def answer_sources(config: Config, model: SavedModel | None) -> list[Source]:
    """The files of the list.

    Raises:
        UserError: there is no such file.
    """
    files = config.answer.answers
    if files == AUTO:
        files = None if model is None or model.answer_list is None else str(model.answer_list)
    return [] if files is None else find(files, "--answers")


def read_answers(config: Config, model: SavedModel) -> tuple[dict[str, Any], AnswerTree | None]:
    """The settings that suit the list of a model's answers, none cut and the most probable the best; and its tree. Says which list.

    Raises:
        UserError: the list cannot be used, or a flag contradicts it. DoesNotFit: it is too large to be read.
    """
    sources = answer_sources(config, model)
    writes_text = MODEL_HEADS[model.shape.head].writes_text
    if sources and not writes_text and config.given("answers"):
        raise UserError("--answers = {answers}, is for models that write text; omit it", answers=config.answer.answers)
    if not sources or not writes_text:
        return {}, None
    settings, tree, _ = read_list(config, sources, model.tokenizer)
    Progress(1, rank() == 0, stream=sys.stderr).note(describe(tree, sources))
    return settings, tree


def read_list(config: Config, sources: Sequence[Source], texts: Path) -> tuple[dict[str, Any], AnswerTree, Path]:
    """The settings that suit a list of answers, its tree, and the folder that holds it and the list as `ANSWERS_FILE`.

    Args:
        texts: folder of the tokenizer.
    Raises:
        UserError: the list cannot be used, or a flag contradicts it. DoesNotFit: it is too large to be read.
    """
    how, usual = config.generate, GenerateConfig()
    files = ", ".join(str(source.path) for source in sources)
    refuse(without_effect(config.changed(answers=files), ("answers",)))

    def make(path: Path) -> None:
        most = child_bytes(config.memory.memory_budget)
        try:
            call(_build, sources, config.data, texts, path, max_bytes=most)
        except ChildDied as died:
            if died.reason == MEMORY:
                told = say(
                    "{files}: the list takes more than the {size} that --memory_budget leaves; raise it, or give fewer "
                    "answers",
                    files=files,
                    size=format_size(most),
                )
                raise DoesNotFit(told) from None
            if died.reason == CRASHED:
                told = say(
                    "{files}: reading has crashed a library ({died}); fetch or write the file anew",
                    files=files,
                    died=died,
                )
                raise UserError(told) from None
            raise

    made = _folder_of(config.data, sources, Tokenizer.load(texts))
    tree = read_once_made(made, make, _tree_in)
    if config.given("max_new_tokens") and how.max_new_tokens < tree.longest:
        raise UserError(
            "--max_new_tokens = {max_new_tokens}, would cut answers of {files}, whose longest has {longest} "
            "tokens; omit it",
            max_new_tokens=how.max_new_tokens,
            files=files,
            longest=tree.longest,
        )
    without_list = Need("answers", ("none",))
    settings = {
        name: member.default
        for name, (_, member) in settings_by_name().items()
        if without_list in member.metadata["needs"]
    }
    settings["max_new_tokens"] = tree.longest
    if not config.given("length_penalty") and how.length_penalty == usual.length_penalty:
        settings["length_penalty"] = 0.0
    return settings, tree, made


def foreseen_tree(config: Config) -> tuple[int, str]:
    """Bytes of the tree that a run of these settings will hold, and what is said of it; none without a list.

    As it lies in the cache; else as many times the tree of the first answers as there are.
    """
    sources = answer_sources(config, None)
    if not sources:
        return 0, ""
    groups = config.data, config.train.is_finetune, config.model, config.tokenizer
    return look(config, _foreseen, *groups, sources, always_in_child=True)


def _foreseen(
    data: DataConfig, is_finetune: bool, model: T5ModelConfig, how: TokenizerConfig, sources: Sequence[Source]
) -> tuple[int, str]:
    tokenizer: Tokenizer | None = None
    with suppress(NotMade):
        rows = find_training_data(data, is_finetune, only_if_made)
        tokenizer = Tokenizer.load(tokenizer_folder(data, how.tokenizer_type, model.vocab_size, rows, only_if_made))
        folder = _folder_of(data, sources, tokenizer)
        tree = read_once_made(folder, lambda path: None, _tree_in, only_if_made)
        return tree.num_bytes, describe(tree, sources)
    if not (first := list(islice(_texts(sources, data), SAMPLED_ANSWERS))):
        return 0, ""  # as the run will say
    if tokenizer is not None:
        tree = AnswerTree.build(tokenizer.encode_prompts(first), tokenizer.eos_id)
    else:  # no tokenizer makes more tokens than bytes
        tree = AnswerTree.build((np.frombuffer(text.encode(), np.uint8) for text in first), eos_id=256)
    count = len(first) if len(first) < SAMPLED_ANSWERS else max(len(first), about_rows(sources))
    size = tree.num_bytes * count // len(first)
    told = say(
        "answers come from {file}: about {count}, {size} in memory",
        file=join(", ", (str(source.path) for source in sources)),
        count=f"{count:,}",
        size=format_size(size),
    )
    return size, told


def _folder_of(data: DataConfig, sources: Sequence[Source], tokenizer: Tokenizer) -> Path:
    facts = [FORMAT, sources_fingerprint(sources), data.response_column, tokenizer.fingerprint]
    return Path(data.cache_dir) / "answers" / fingerprint(facts)


def _tree_in(folder: Path) -> AnswerTree:
    return AnswerTree.load(folder / TREE_FILE)


def describe(tree: AnswerTree, sources: Sequence[Source]) -> str:
    """What is said of a list of answers."""
    return say(
        "answers come from {file}: {count} of at most {longest} tokens, {size}",
        file=join(", ", (str(source.path) for source in sources)),
        count=f"{tree.num_answers:,}",
        longest=tree.longest,
        size=format_size(tree.num_bytes),
    )


def unlisted_note(tree: AnswerTree, loader: StepLoader, rows: int, of: range | None = None) -> list[str]:
    """What is said of references among the first held-out rows, or those of a set, that are not in the list; nothing where all are."""
    count, every = 0, 0
    for batch in loader.evaluation_batches(rows, READ_ROWS, rows=of):
        for target, length in zip(batch.labels, batch.target_lengths, strict=True):
            count, every = count + (target[:length].tolist() not in tree), every + 1
    told = "{count} of {rows} have a reference that is not in the list of answers, which no answer matches"
    return [say(told, count=f"{count:,}", rows=counted(every, "row"))] if count else []


def _build(sources: Sequence[Source], data: DataConfig, folder: Path, path: Path) -> None:
    tokenizer, is_of_lines = Tokenizer.load(folder), True

    def answers(file: TextIO) -> Iterator[NDArray[np.int32]]:
        nonlocal is_of_lines
        texts = _texts(sources, data)
        while batch := list(islice(texts, BATCH_LINES)):
            for text, ids in zip(batch, tokenizer.encode_prompts(batch), strict=True):
                if tokenizer.unk_id in ids:
                    raise UserError(
                        "--answers, the tokenizer has no token for a part of {text!r}, which no answer can contain; leave it "
                        "out",
                        text=text[:60],
                    )
                is_of_lines = is_of_lines and text == text.strip() and not {"\n", "\r"} & {*text}
                file.write(f"{text}\n")
                yield ids

    with writing("cache_dir", data.cache_dir):
        path.mkdir()
        try:
            with (path / ANSWERS_FILE).open("w", encoding="utf8") as file:
                AnswerTree.build(answers(file), tokenizer.eos_id).save(path / TREE_FILE)
        except ValueError as error:
            raise UserError("--answers = {path}, cannot be used: {error}", path=sources[0].path, error=error) from None
        if not is_of_lines:  # as a text file they would be others
            (path / ANSWERS_FILE).unlink()


def _texts(sources: Sequence[Source], data: DataConfig) -> Iterator[str]:
    """The answers as texts, without blank ones."""
    bad_rows = BadRows()
    for source in sources:
        if source.kind == TEXT:
            with reading(source):
                yield from filter(None, (line.strip() for line in decoded_lines(source, bad_rows)))
        else:
            texts = (text for rows in read_rows([source], [_column(source, data)], bad_rows) for (text,) in rows)
            yield from filter(str.strip, texts)


def _column(source: Source, data: DataConfig) -> str:
    names = head_of(source).all_names
    if data.response_column in names or len(names) == 1:
        return data.response_column if data.response_column in names else names[0]
    raise UserError(
        "--answers = {path}, has no column {response_column}; its columns: {names}; name one with --response_column",
        path=source.path,
        response_column=data.response_column,
        names=listed(names),
    )
