"""`embed`: vectors of texts, the encoder's last hidden states. Their mean over a text, or one for each token.

Texts stream through in parts of a few MiB. Each part is on the disk before the next begins, so that an interrupted
command goes on behind the last one; the vectors depend neither on that nor on which texts share a batch of one part
with them. When all are there, the parts become one file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from commands.answering import check_one_process, refuse_several_adapters
from commands.generate import STANDARD_INPUT, check_input, prompts_of, read_marks
from commands.new_folder import holding_output
from commands.text_reader import ROUNDED, TextReader, text_columns, text_settings
from commands.unfinished import UnfinishedFile, tells_how_to_continue
from commands.vector_files import ID, VECTOR, VECTORS, Vectors, write_part, writer_for
from common.language import say
from common.storage import fingerprint
from common.units import MIB
from data.batches.collate import LabelledRow, collate_labels
from data.prepare.encode import TextEncoder, unknown_warning
from data.sources.lines import BadRows
from data.sources.prompts import Prompt
from engine.step import to_micro_batch
from memory.answers import AnswerBatch, HeldModel
from memory.monitor import watched
from settings.declared import Config, DataConfig
from settings.errors import UserError
from settings.fields import AUTO, counted
from training.loaded_model import LoadedModel, load_model, note
from training.report.progress import Progress
from training.saved_model import find_model

FORMAT = 3  # raise it when the same texts would give other vectors
PART_ROWS = 256  # a part of texts ends with this one, or with
PART_TEXT_BYTES = 1 * MIB  # of texts, or
PART_BYTES = 4 * MIB  # of vectors
VECTOR_COPIES = 3  # of a part: as computed, joined, and as a file is made of it
LONGEST_ID = 256  # letters
LOOKED_AT = 16  # texts in which unknown tokens are counted
Tokens = tuple[list[int], slice | NDArray[np.int64]]  # ids with end of text, and which of them are the text's own


@holding_output
def embed(config: Config) -> None:
    """Write the vectors of texts to a file, or show them.

    Raises:
        UserError: model, input or output are not usable. DoesNotFit: the budget does not hold the longest text.
    """
    check_one_process("embed")
    source = config.answer.input
    if source is None:
        raise UserError(say('--input = none, texts are needed; give a text (--input="Hello") or a file of them'))
    model = find_model(config)
    refuse_several_adapters(model)
    bad_rows = BadRows(config.data.skip_bad_rows)
    config = config.with_saved(text_settings(model, "text_column"))
    columns = text_columns(config.data, config.given("text_column"), model)
    reads_files = check_input(source)
    output = None
    if config.answer.output is not None:
        path = Path(config.answer.output)
        write = writer_for(path)
        if source == STANDARD_INPUT:
            raise UserError(
                say("--input = -, standard input cannot be read again; write it to a file, or omit --output")
            )
        settings = [config.data.text_column, config.data.max_seq_len, config.data.prepare_text, config.embed.vectors]
        identity = fingerprint([FORMAT, *read_marks(model, source), settings, config.memory.mixed_precision])
        output = UnfinishedFile(path, config.run.overwrite, identity, ".arrow")
    trained = load_model(config, model, AnswerBatch(1, config.data.max_seq_len, 1), reads_files=reads_files)
    rows_at_once = config.train.eval_batch_size_per_gpu
    embedder = Embedder.of(trained, config.data, rows_at_once, config.embed.vectors)
    max_bytes = trained.reserve_reading(embedder.predict(ROUNDED)) if reads_files else 0
    ids = ShortIds()
    texts = _texts(prompts_of(columns, source, bad_rows, max_bytes, (ID,)), ids)
    if output is not None and output.rows:
        text = "{file}: {rows} already done; continuing after them"
        Progress(1).note(say(text, file=output.path, rows=counted(output.rows, "row")))
        next(islice(texts, output.rows, output.rows), None)
    is_first = True
    with watched(trained.monitor, "--eval_batch_size_per_gpu=1"), tells_how_to_continue(output):
        for part in _parts(texts, embedder):
            if is_first:
                embedder.warn_of_unknown_tokens([text for _, text in part[:LOOKED_AT]])
                is_first = False
            vectors = embedder(text for _, text in part)
            rows = list(zip((name for name, _ in part), vectors, strict=True))
            if output is not None:
                with output.next_part(len(rows)) as path:
                    write_part(path, rows)
                continue
            for name, vector in rows:
                print(json.dumps({ID: name, embedder.name: vector.tolist()}, ensure_ascii=False), flush=True)
        if output is not None:
            if not output.rows:
                raise UserError(say("--output = {path}, there are no texts to write vectors of", path=output.path))
            parts = output.paths
            output.finish(lambda file: write(file, parts, output.rows))
            Progress(1).note(say("{file}: vectors of {rows}", file=output.path, rows=counted(output.rows, "row")))
    if ids.count:
        text = "{ids} of over {most} letters: their beginning, and a digest behind it, such as {example}"
        note(say(text, ids=counted(ids.count, "id"), most=LONGEST_ID, example=ids.example))
    if bad_rows.count:
        rows_left_out = counted(bad_rows.count, "row")
        note(say("left out: {rows}, such as {example}", rows=rows_left_out, example=bad_rows.examples[0]))


@dataclass
class ShortIds:
    """Makes long ids short: an array of ids gives every one the room of the longest, and a member of an archive has no
    longer name.

    Args:
        count: ids that were shortened. example: the first of them, as it is now.
    """

    count: int = 0
    example: str = ""

    def of(self, name: str) -> str:
        """An id, or the beginning of a long one and a digest of all of it, which differs for ids that begin alike."""
        if len(name) <= LONGEST_ID:
            return name
        short = f"{name[: LONGEST_ID - 33]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        self.count += 1
        self.example = self.example or short
        return short


def _texts(prompts: Iterator[Prompt], ids: ShortIds) -> Iterator[tuple[str, str]]:
    """The id of each text, or its number, and the text; blank ones are left out."""
    for number, prompt in enumerate(prompts):
        if prompt.text.strip():
            given_id = prompt.columns.get(ID)
            yield ids.of(str(number if given_id in (None, "") else given_id)), prompt.text


def _parts(texts: Iterator[tuple[str, str]], embedder: Embedder) -> Iterator[list[tuple[str, str]]]:
    """Texts in parts that depend on the texts and the model alone: so many, or fewer of large ones."""
    part = list[tuple[str, str]]()
    text_bytes = vector_bytes = 0
    for name, text in texts:
        part.append((name, text))
        text_bytes += sys.getsizeof(text)
        vector_bytes += 4 * embedder.width * (min(len(text), embedder.longest) if embedder.per_token else 1)
        if len(part) == PART_ROWS or text_bytes >= PART_TEXT_BYTES or vector_bytes >= PART_BYTES:
            yield part
            part = []
            text_bytes = vector_bytes = 0
    if part:
        yield part


@dataclass
class Embedder(TextReader):
    """Vectors of texts.

    Args:
        per_token: one vector for each token, not one for each text.
    """

    per_token: bool = False

    @classmethod
    def of(cls, trained: LoadedModel, data: DataConfig, rows: int | str = AUTO, vectors: str = "mean") -> Embedder:
        """Reads texts as the settings say.

        Args:
            rows: the setting `eval_batch_size_per_gpu`. vectors: the setting of that name.
        """
        return cls(
            trained,
            TextEncoder(trained.tokenizer, data.prepare_text),
            data.max_seq_len,
            rows=rows if isinstance(rows, int) else None,
            per_token=vectors == "token",
        )

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.trained.blockwise.model.config.d_model

    @property
    def name(self) -> str:
        """What the vectors of a row are called."""
        return VECTORS if self.per_token else VECTOR

    def __call__(self, texts: Iterator[str]) -> list[Vectors]:
        """The vectors of texts, in their order; end of text and prefixes have none.

        Raises:
            DoesNotFit: the budget does not hold a text.
        """
        return self.vectors([self.tokens(text) for text in texts])

    def warn_of_unknown_tokens(self, texts: Sequence[str]) -> None:
        """Warn where the tokenizer does not know much of texts."""
        unk_id = self.trained.tokenizer.unk_id
        tokens = [token for text in texts for token in self.tokens(text)[0]]
        warning = unknown_warning(tokens.count(-1 if unk_id is None else unk_id), len(tokens))
        if warning:
            Progress(1, stream=sys.stderr).warn(warning)

    def tokens(self, text: str) -> Tokens:
        """Ids of a text with end of text, and which of them are its own: those of a protein's letters, else all but the
        last.
        """
        eos = self.trained.tokenizer.eos_id
        if self.encoder.prepare == "none":
            ids = self.encoder.beginning(text, self.longest - 1)
            return [*ids.tolist(), eos], slice(0, max(1, len(ids)))
        ids, places = self.encoder.with_places(text)
        ids = ids[: self.longest - 1]
        return [*ids.tolist(), eos], places[(places >= 0) & (places < len(ids))]

    def vectors(self, rows: Sequence[Tokens]) -> list[Vectors]:
        """The vectors of rows of ids, in their order; see `tokens`."""

        def vectors(numbers: list[int]) -> Iterator[Vectors]:
            hidden = self._hidden([rows[number][0] for number in numbers])
            for number, states in zip(numbers, hidden, strict=True):
                own = rows[number][1]
                states = states[own if isinstance(own, slice) else torch.from_numpy(own).to(states.device)].float()
                yield (states if self.per_token else states.mean(0)).cpu().numpy()

        return self.in_batches([len(ids) for ids, _ in rows], vectors)

    def _hidden(self, rows: list[list[int]]) -> Sequence[torch.Tensor]:
        blockwise, device = self.trained.blockwise, self.trained.device.torch_device
        shape = blockwise.model.config
        unlabelled = np.zeros(1, np.int64)
        batch = collate_labels(
            [LabelledRow(np.array(ids, np.int64), unlabelled, 0) for ids in rows], shape.pad_token_id
        )
        (output,) = blockwise.encode([to_micro_batch(batch, shape, device)])
        return output.split([len(ids) for ids in rows])

    def _held(self, longest: int) -> HeldModel:
        """The model beside the vectors of a part, which wait until it is written, where each token has one."""
        held = super()._held(longest)
        if not self.per_token or self.trained.budget.is_on_device:
            return held
        return replace(held, base_bytes=held.base_bytes + VECTOR_COPIES * (PART_BYTES + 4 * self.width * longest))
