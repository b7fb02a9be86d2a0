"""The command `embed` writes vectors of texts: those of a model's embedding head, or without one the encoder's last
hidden states, or their mean over each text.

A vector depends on its text alone: not on the other texts of its batch, nor on where the command was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from commands import text_rows
from commands.answering import Answering, find_answering
from commands.new_folder import holding_output
from commands.text_reader import DOCUMENT, LENGTH_MULTIPLE, PART_BYTES, QUERY, Embedder, full_width, text_columns
from commands.text_rows import STANDARD_INPUT, TextWork, UnfinishedFile, in_parts
from commands.vector_files import ID, VECTOR, VECTORS, Vectors, write_part, writer_for
from data.sources.lines import BadRows
from data.sources.prompts import Prompt
from memory.answers import AnswerBatch
from settings.declared import Config
from settings.errors import UserError, refuse
from settings.fields import AUTO, counted
from settings.needs import without_effect
from support.language import say
from support.units import MIB
from training.loaded_model import note

# A part ends when it reaches one of these limits, or `PART_BYTES` of vectors:
PART_ROWS = 256
PART_TEXT_BYTES = 1 * MIB
MAX_ID_LENGTH = 256  # in characters
DIGEST_LENGTH = 32  # hexadecimal digits
SAMPLED_TEXTS = 16  # Texts that are checked for unknown tokens.


@holding_output
def embed(config: Config) -> None:
    """Write the vectors of texts to a file, or print them.

    Raises:
        UserError: the model, the input or the output cannot be used.
        DoesNotFit: the longest text does not fit the budget.
    """
    if config.answer.input is None:
        raise UserError(say('--input = none, texts are needed; give a text (--input="Hello") or a file of them'))
    work = VectorWork(config)
    if config.answer.output is not None:
        writer_for(Path(config.answer.output))
        if config.answer.input == STANDARD_INPUT:
            raise UserError(
                say("--input = -, standard input cannot be read again; write it to a file, or omit --output")
            )
    for text in vector_notes(work.answering):
        note(text)
    text_rows.run(work)


def vector_notes(answering: Answering) -> Iterator[str]:
    """What the user should know of the vectors of a model with an embedding head before they are computed."""
    settings = answering.config.embed
    shape = answering.model.shape
    if not shape.gives_vectors or settings.vectors != AUTO:
        return
    data = answering.config.data
    prompt = {QUERY: data.query_prompt, DOCUMENT: data.document_prompt}.get(settings.prompt_name)
    if prompt:
        yield say("before each text: {prompt!r} (--prompt_name={name})", prompt=prompt, name=settings.prompt_name)
    yield from cut_notes(answering)


def cut_notes(answering: Answering) -> Iterator[str]:
    """That vectors are cut to a width that the model was not trained for, where they are."""
    size = answering.config.embed.truncate_dim
    sizes = answering.model.run_settings.get("matryoshka_sizes")
    trained = {int(word) for word in str(sizes or "").split(",") if word.strip()}
    if size is not None and size not in {*trained, answering.model.shape.vector_size}:
        text = "--truncate_dim = {size}, is no width that this model was trained for (matryoshka_sizes: {sizes})"
        yield say(text, size=size, sizes=sizes or say("none"))


class EmbeddedText(NamedTuple):
    """A text with its vectors.

    Args:
        id: of its row, or else the row's number.
    """

    id: str
    vectors: Vectors
    text: str


class VectorWork(TextWork[EmbeddedText]):
    """Vectors of texts."""

    batch_flag = "eval_batch_size_per_gpu"
    keeps = (ID,)
    part_suffix = ".arrow"
    version = 3
    command = "embed"

    def __init__(self, config: Config) -> None:
        answering = find_answering(config, self.command)
        settings = answering.config.embed
        refuse(without_effect(answering.config, ("vectors",)))
        super().__init__(answering, text_columns(answering, settings.prompt_name))
        full_width(answering.model.shape, settings)
        self.num_short_ids = 0
        self.first_short_id = ""

    def load(self, reads_files: bool = False) -> dict[str, int]:
        longest_text = AnswerBatch(rows=1, source_tokens=self.config.data.max_seq_len, new_tokens=1)
        self.trained = self.answering.load(longest_text, reads_files)
        rows = self.config.train.eval_batch_size_per_gpu
        self.embedder = Embedder(self.trained, self.config.data, rows, self.config.embed)
        return self.embedder.predicted_memory(LENGTH_MULTIPLE)

    def identity(self) -> list[Any]:
        data = self.config.data
        settings = [data.text_column, data.max_seq_len, data.prepare_text, vars(self.config.embed)]
        return [settings, data.query_prompt, data.document_prompt, self.config.memory.mixed_precision]

    def _texts(self, prompts: Iterator[Prompt]) -> Iterator[tuple[str, str]]:
        """(id, text) of each row whose text is not blank; the id of a row without one is its number."""
        for number, prompt in enumerate(prompts):
            if prompt.text.strip():
                row_id = prompt.columns.get(ID)
                if row_id in (None, ""):
                    row_id = number
                yield self._short_id(str(row_id)), prompt.text

    def _short_id(self, row_id: str) -> str:
        """The id itself, or if it is too long its beginning and a digest of all of it.

        An array of strings takes for each one as much memory as for the longest.
        """
        if len(row_id) <= MAX_ID_LENGTH:
            return row_id
        digest = hashlib.sha256(row_id.encode()).hexdigest()[:DIGEST_LENGTH]
        short_id = f"{row_id[: MAX_ID_LENGTH - DIGEST_LENGTH - 1]}~{digest}"
        self.num_short_ids += 1
        self.first_short_id = self.first_short_id or short_id
        return short_id

    def parts(self, prompts: Iterator[Prompt], rows_done: int = 0) -> Iterator[list[EmbeddedText]]:
        embedder = self.embedder

        def num_bytes(row: tuple[str, str]) -> int:
            """Bytes of the fp32 vectors, or if that is more those of the text, scaled to count against `PART_BYTES`."""
            _, text = row
            num_vectors = min(len(text), embedder.longest) if embedder.per_token else 1
            return max(4 * embedder.width * num_vectors, sys.getsizeof(text) * PART_BYTES // PART_TEXT_BYTES)

        remaining = islice(self._texts(prompts), rows_done, None)
        for number, part in enumerate(in_parts(remaining, PART_ROWS, PART_BYTES, num_bytes)):
            ids = [row_id for row_id, _ in part]
            texts = [text for _, text in part]
            if number == 0:
                embedder.warn_of_unknown_tokens(texts[:SAMPLED_TEXTS])
            yield list(map(EmbeddedText, ids, embedder.embed(texts), texts))

    def show(self, part: list[EmbeddedText]) -> None:
        column = VECTORS if self.embedder.per_token else VECTOR
        for row in part:
            print(json.dumps({ID: row.id, column: row.vectors.tolist()}, ensure_ascii=False), flush=True)

    def write(self, part: list[EmbeddedText], path: Path) -> None:
        write_part(path, [(row.id, row.vectors) for row in part])

    def join(self, parts: Sequence[Path], rows: int, path: Path) -> None:
        assert self.config.answer.output is not None
        if not rows:
            raise UserError(
                say("--output = {path}, there are no texts to write vectors of", path=self.config.answer.output)
            )
        writer_for(Path(self.config.answer.output))(path, parts, rows)

    def notes(self, output: UnfinishedFile | None, bad_rows: BadRows) -> list[str]:
        notes: list[str] = []
        if output is not None:
            notes.append(say("{file}: vectors of {rows}", file=output.path, rows=counted(output.rows, "row")))
        if self.num_short_ids:
            text = "{ids} of over {most} letters: their beginning, and a digest behind it, such as {example}"
            ids = counted(self.num_short_ids, "id")
            notes.append(say(text, ids=ids, most=MAX_ID_LENGTH, example=self.first_short_id))
        if self.embedder.num_cut:
            rows = counted(self.embedder.num_cut, "row")
            notes.append(say("truncated to --max_seq_len={longest}: {rows}", longest=self.embedder.longest, rows=rows))
        if bad_rows.count:
            rows = counted(bad_rows.count, "row")
            notes.append(say("left out: {rows}, such as {example}", rows=rows, example=bad_rows.examples[0]))
        return notes
