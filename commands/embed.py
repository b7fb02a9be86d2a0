"""`embed`: vectors of texts, the encoder's last hidden states. Their mean over a text, or one for each token.

A vector depends neither on where the command was interrupted nor on which texts share a batch with its own.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from commands import text_rows
from commands.answering import find_answering
from commands.new_folder import holding_output
from commands.text_reader import PART_BYTES, ROUNDED, Embedder, text_columns
from commands.text_rows import STANDARD_INPUT, TextWork, UnfinishedFile, in_parts
from commands.vector_files import ID, VECTOR, VECTORS, Vectors, write_part, writer_for
from common.language import say
from common.units import MIB
from data.sources.lines import BadRows
from data.sources.prompts import Prompt
from memory.answers import AnswerBatch
from settings.declared import Config
from settings.errors import UserError
from settings.fields import counted

PART_ROWS = 256  # A part ends with so many texts,
PART_TEXT_BYTES = 1 * MIB  # with the one that brings so many bytes of text, or that brings `PART_BYTES` of vectors.
LONGEST_ID = 256  # letters
SAMPLED_TEXTS = 16  # Unknown tokens are counted in these.


@holding_output
def embed(config: Config) -> None:
    """Write the vectors of texts to a file, or show them.

    Raises:
        UserError: model, input or output are not usable. DoesNotFit: the budget does not hold the longest text.
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
    text_rows.run(work)


class VectorWork(TextWork[tuple[str, Vectors]]):
    """Vectors of texts, each with the id of its row, or its number."""

    batch_flag = "eval_batch_size_per_gpu"
    keeps = (ID,)
    part_suffix = ".arrow"
    version = 3

    def __init__(self, config: Config) -> None:
        answering = find_answering(config, "embed")
        super().__init__(answering, text_columns(answering))
        self.num_short_ids = 0
        self.first_short_id = ""

    def load(self, reads_files: bool = False) -> dict[str, int]:
        self.trained = self.answering.load(AnswerBatch(1, self.config.data.max_seq_len, 1), reads_files)
        rows = self.config.train.eval_batch_size_per_gpu
        self.embedder = Embedder(self.trained, self.config.data, rows, self.config.embed.vectors)
        return self.embedder.predict(ROUNDED)

    def identity(self) -> list[Any]:
        data = self.config.data
        settings = [data.text_column, data.max_seq_len, data.prepare_text, self.config.embed.vectors]
        return [settings, self.config.memory.mixed_precision]

    def _texts(self, prompts: Iterator[Prompt]) -> Iterator[tuple[str, str]]:
        """The id of each text, or its number, and the text; blank ones are left out."""
        for number, prompt in enumerate(prompts):
            if prompt.text.strip():
                row_id = prompt.columns.get(ID)
                yield self._short_id(str(number if row_id in (None, "") else row_id)), prompt.text

    def _short_id(self, name: str) -> str:
        """An id, or the beginning of a long one and a digest of all of it: an array of ids gives every one the memory
        of the longest.
        """
        if len(name) <= LONGEST_ID:
            return name
        short = f"{name[: LONGEST_ID - 33]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        self.num_short_ids += 1
        self.first_short_id = self.first_short_id or short
        return short

    def parts(self, prompts: Iterator[Prompt], rows_done: int = 0) -> Iterator[list[tuple[str, Vectors]]]:
        embedder = self.embedder

        def num_bytes(row: tuple[str, str]) -> int:
            vectors = min(len(row[1]), embedder.longest) if embedder.per_token else 1
            return max(4 * embedder.width * vectors, sys.getsizeof(row[1]) * PART_BYTES // PART_TEXT_BYTES)

        open_texts = islice(self._texts(prompts), rows_done, None)
        for number, part in enumerate(in_parts(open_texts, PART_ROWS, PART_BYTES, num_bytes)):
            texts = [text for _, text in part]
            if number == 0:
                embedder.warn_of_unknown_tokens(texts[:SAMPLED_TEXTS])
            yield list(zip((name for name, _ in part), embedder.embed(texts), strict=True))

    def show(self, part: list[tuple[str, Vectors]]) -> None:
        column = VECTORS if self.embedder.per_token else VECTOR
        for name, vector in part:
            print(json.dumps({ID: name, column: vector.tolist()}, ensure_ascii=False), flush=True)

    def write(self, part: list[tuple[str, Vectors]], path: Path) -> None:
        write_part(path, part)

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
            notes.append(say(text, ids=ids, most=LONGEST_ID, example=self.first_short_id))
        if bad_rows.count:
            rows = counted(bad_rows.count, "row")
            notes.append(say("left out: {rows}, such as {example}", rows=rows, example=bad_rows.examples[0]))
        return notes
