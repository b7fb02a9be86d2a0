"""Texts that a model reads without writing any: for vectors and for labels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from commands.answering import Answering
from commands.vector_files import Vectors
from data.batches.collate import LabelledRow, collate_labels
from data.prepare.encode import TextEncoder, unknown_warning
from data.sources.embedding_columns import FIRST_TEXTS, SECOND_TEXTS
from data.tokenizers.backends import Ids
from engine.step import to_micro_batch
from memory.answers import HeldModel, rows_to_measure
from settings.declared import DataConfig, EmbedConfig, T5ModelConfig
from settings.errors import UserError
from settings.fields import AUTO, Auto, not_known
from settings.tasks import task_for
from support.language import say
from support.units import MIB
from tasks.base import Outputs
from tasks.label_outputs import EncodedText, LabelAnswer, LabelOutputs
from training.loaded_model import LoadedModel
from training.report.progress import Progress

MOST_ROWS = 64  # at once
MOST_AT_ONCE = 16_384  # tokens
LENGTH_MULTIPLE = 64  # Memory is planned for lengths in tokens that are multiples of this.
PART_BYTES = 4 * MIB  # A part of vectors ends with the one that brings so many bytes.
VECTOR_COPIES = 3  # Vectors of a part are there as computed, joined, and as a file is made of them.
# Names of prompts.
QUERY = "query"
DOCUMENT = "document"
NO_PROMPT = "none"
Tokens = tuple[NDArray[np.int32], slice | NDArray[np.int64]]  # ids with end of text, and which are the text's own
Result = TypeVar("Result")


def text_columns(answering: Answering, prompt_name: str = DOCUMENT) -> list[DataConfig]:
    """Where texts are looked for, first choice first: in the column that is named, else in those that the model was
    trained on.

    Args:
        prompt_name: query, where a model that learnt from rows of several texts reads the first of a row; else it reads
            the second.
    """
    data = answering.config.data
    usual = DataConfig().text_column
    named = [data.text_column]
    others = [*answering.model.settings_of("prompt_column").values(), usual]
    if answering.model.shape.gives_vectors:
        words = [word.strip() for word in data.text_column.split(",")]
        named = words[:1] if prompt_name == QUERY else words[1:2] or words
        others = [*FIRST_TEXTS, usual] if prompt_name == QUERY else [usual, *SECOND_TEXTS]
        if data.text_column == usual and not answering.config.is_set("text_column"):
            named = []  # Nobody has named it.
    names = named if answering.config.is_set("text_column") else [*named, *others]
    return [replace(data, text_column=name, prompt_column=name) for name in dict.fromkeys(names)]


class TextReader:
    """Runs a model over texts, in batches of like length that the budget holds.

    Args:
        data: how texts are read.
        rows: most texts at once; auto: what the budget holds.
    """

    rows_flag: ClassVar[str] = "eval_batch_size_per_gpu"

    def __init__(self, trained: LoadedModel, data: DataConfig, rows: int | Auto = AUTO) -> None:
        self.trained = trained
        self.encoder = TextEncoder(trained.tokenizer, data.prepare_text)
        self.longest = data.max_seq_len
        self.rows = rows
        self.beside_bytes = 0  # Of the budget, for others than this.

    def in_batches(self, lengths: Sequence[int], work: Callable[[list[int]], Iterable[Result]]) -> list[Result]:
        """What `work` makes of rows, by their numbers, the longest first.

        Args:
            lengths: of the rows in tokens.
        Raises:
            DoesNotFit: the budget does not hold a text.
        """
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        results = dict[int, Result]()
        while order:
            longest = -(-lengths[order[0]] // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            requested = AUTO if self.rows == AUTO else min(int(self.rows), len(order))
            usual = min(len(order), max(1, min(MOST_ROWS, MOST_AT_ONCE // longest)))
            sides = (longest, self.target_tokens(longest))
            limit = self.trained.budget.limit()
            count = rows_to_measure(self.model_held(longest), limit, requested, usual, sides, self.rows_flag)
            numbers = order[:count]
            order = order[count:]
            results.update(zip(numbers, work(numbers), strict=True))
        return [results[row] for row in range(len(lengths))]

    def predicted_memory(self, longest: int) -> dict[str, int]:
        """The peak memory for one text of so many tokens: component -> bytes."""
        return self.model_held(longest).measuring(1, longest, self.target_tokens(longest))

    def target_tokens(self, longest: int) -> int:
        """Tokens that a decoder reads of a text of so many."""
        return 0

    def model_held(self, longest: int) -> HeldModel:
        """The model beside what else stands in memory while a text of so many tokens is read."""
        model = self.trained.held_model
        return replace(model, base_bytes=model.base_bytes + self.beside_bytes)


class Embedder(TextReader):
    """Vectors of texts: of a model with an embedding head those that its training and evaluation compare, else hidden
    states or their mean.

    Args:
        settings: which vectors, the prompt before each text, and to how many numbers vectors are cut.
    Raises:
        UserError: the vectors have fewer numbers than they are to be cut to.
    """

    def __init__(
        self, trained: LoadedModel, data: DataConfig, rows: int | Auto = AUTO, settings: EmbedConfig | None = None
    ) -> None:
        super().__init__(trained, data, rows)
        settings = settings or EmbedConfig()
        shape = trained.held_model.shape
        self.per_token = settings.vectors == "token"
        self.has_head = shape.gives_vectors and settings.vectors == AUTO
        self.prompts = {QUERY: "", DOCUMENT: "", NO_PROMPT: ""}
        if self.has_head:
            self.prompts |= {QUERY: data.query_prompt or "", DOCUMENT: data.document_prompt or ""}
        self.prompt_name = settings.prompt_name
        width = full_width(shape, settings)
        self.width = settings.truncate_dim or width
        self.num_cut = 0  # Texts of which only the beginning was read.

    def embed(self, texts: Iterable[str], prompt_name: str | None = None) -> list[Vectors]:
        """The vectors of texts, in their order; of hidden states, end of text and prefixes have none.

        Args:
            prompt_name: of the prompt before each text; None: that of the settings.
        Raises:
            DoesNotFit: the budget does not hold a text. UserError: there is no such prompt.
        """
        return self.vectors([self.tokens(text, self.longest, prompt_name) for text in texts])

    def warn_of_unknown_tokens(self, texts: Sequence[str]) -> None:
        """Warn where the tokenizer does not know much of texts."""
        unk_id = self.trained.tokenizer.unk_id
        tokens = [token for text in texts for token in self.encoder.beginning(text, self.longest).tolist()]
        warning = unknown_warning(tokens.count(unk_id), len(tokens))
        if warning:
            Progress(1, stream=sys.stderr).warn(warning)

    def tokens(self, text: str, longest: int, prompt_name: str | None = None) -> Tokens:
        """Ids of a text with end of text, at most `longest`, and which of them the vectors are of: all with an
        embedding head; else the text's own, those of a protein's letters, or all but the last.

        Args:
            prompt_name: as of `embed`.
        Raises:
            UserError: there is no such prompt.
        """
        name = prompt_name or self.prompt_name
        if name not in self.prompts:
            problem = not_known(name, self.prompts)
            raise UserError(say("prompt_name = {name}, {problem}", name=name, problem=problem))
        if self.has_head:
            return self._whole(self.prompts[name] + text, longest)
        if self.encoder.prepare == "none":
            ids = self.encoder.beginning(text, longest - 1)
            own: slice | NDArray[np.int64] = slice(0, max(1, len(ids)))
        else:
            ids, token_indices = self.encoder.with_places(text)
            ids = ids[: longest - 1]
            own = token_indices[(token_indices >= 0) & (token_indices < len(ids))]
        return self._ended(ids), own

    def _whole(self, text: str, longest: int) -> Tokens:
        """A text as rows of training have it: nothing but its end is an end of text."""
        ids = self.encoder.beginning(text, longest)
        ids = ids[ids != self.trained.tokenizer.eos_id]
        self.num_cut += len(ids) >= longest
        return self._ended(ids[: longest - 1]), slice(None)

    def _ended(self, ids: Ids) -> NDArray[np.int32]:
        return np.append(ids, self.trained.tokenizer.eos_id).astype(np.int32)

    def vectors(self, rows: Sequence[Tokens], width: int | None = None) -> list[Vectors]:
        """The vectors of rows of ids, in their order; see `tokens`.

        Args:
            width: to which those of an embedding head are cut; None: as the settings say.
        """
        blockwise = self.trained.blockwise
        shape = blockwise.model.config
        unlabelled = np.zeros(1, np.int64)

        def vectors(numbers: list[int]) -> Iterator[Vectors]:
            texts = [LabelledRow(rows[number][0].astype(np.int64), unlabelled, 0) for number in numbers]
            batch = collate_labels(texts, shape.pad_token_id)
            micro_batch = to_micro_batch(batch, shape, self.trained.device.torch_device)
            if self.has_head:
                (of_texts,) = blockwise.embed([micro_batch])
                yield from cut_vectors(of_texts, width or self.width, shape.normalize).cpu().numpy()
                return
            (output,) = blockwise.encode([micro_batch])
            hidden = output.split([len(rows[number][0]) for number in numbers])
            for number, states in zip(numbers, hidden, strict=True):
                own = rows[number][1]
                states = states[own if isinstance(own, slice) else torch.from_numpy(own).to(states.device)].float()
                yield (states if self.per_token else states.mean(0)).cpu().numpy()

        return self.in_batches([len(ids) for ids, _ in rows], vectors)

    def model_held(self, longest: int) -> HeldModel:
        """Where each token has a vector, those of a part wait until it is written."""
        model = super().model_held(longest)
        if not self.per_token or self.trained.budget.is_on_device:
            return model
        return replace(model, base_bytes=model.base_bytes + VECTOR_COPIES * (PART_BYTES + 4 * self.width * longest))


def full_width(shape: T5ModelConfig, settings: EmbedConfig) -> int:
    """Numbers of an uncut vector.

    Raises:
        UserError: they are fewer than the settings cut them to.
    """
    width = shape.vector_size if shape.gives_vectors and settings.vectors == AUTO else shape.d_model
    if (settings.truncate_dim or 0) > width:
        raise UserError(
            "--truncate_dim = {size}, is more than the {width} numbers of this model's vectors; lower it or omit it",
            size=settings.truncate_dim,
            width=width,
        )
    return width


def cut_vectors(vectors: Tensor, width: int, normalizes: bool) -> Tensor:
    """The first numbers of vectors (R, V) -> (R, width), of length 1 again where the head scales to it."""
    if width == vectors.shape[1]:
        return vectors
    return F.normalize(vectors[:, :width], dim=-1) if normalizes else vectors[:, :width]


class Labeller(TextReader):
    """Labels of texts: what a model with a head over labels says of each."""

    rows_flag: ClassVar[str] = "generate_batch_size"

    def __init__(self, trained: LoadedModel, data: DataConfig, rows: int | Auto = AUTO) -> None:
        super().__init__(trained, data, rows)
        self.task = cast(LabelOutputs, task_for(AUTO, trained.held_model.shape.head))
        self.column = self.task.label_column(trained.held_model.shape.label_names)  # The first column of an answer.

    def encode(self, text: str, longest: int, words: int | None = None) -> EncodedText:
        """At most so many token ids of a text, and where its words or letters are.

        Args:
            words: how many words the text was joined of; None: it is a text.
        """
        return self.task.encode(text, self.encoder, longest, words)

    def answers(self, texts: Sequence[EncodedText]) -> list[LabelAnswer]:
        """What the model says of encoded texts, in their order; raises as `outputs`."""
        names = self.trained.held_model.shape.label_names
        answers = zip(texts, self.outputs(texts), strict=True)
        return [self.task.answer(text, outputs, names) for text, outputs in answers]

    def outputs(self, texts: Sequence[EncodedText]) -> list[Outputs]:
        """The head's outputs for encoded texts, in their order: (1, L), or (tokens, L).

        Raises:
            DoesNotFit: the budget does not hold a text.
        """
        blockwise = self.trained.blockwise
        shape = blockwise.model.config

        def outputs(numbers: list[int]) -> Iterator[Outputs]:
            batch = self.task.unlabelled_batch([texts[number] for number in numbers], shape)
            (logits,) = blockwise.predict([to_micro_batch(batch, shape, self.trained.device.torch_device)])
            of_batch = logits.float().cpu().numpy()
            begin = 0
            for number in numbers:
                end = begin + self.task.labels_of(len(texts[number].ids))
                yield of_batch[begin:end]
                begin = end

        return self.in_batches([len(text.ids) for text in texts], outputs)

    def target_tokens(self, longest: int) -> int:
        return longest * (self.trained.held_model.shape.num_decoder_layers > 0)
