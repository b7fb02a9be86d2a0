"""How relevant documents are to a query, by any model that can say it: a T5 by "true" against "false", a head of
numbers by its number, a head of two classes by the probability of the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import numpy as np

from commands.text_reader import LENGTH_MULTIPLE, Labeller, TextReader
from data.batches.collate import Row, collate
from data.prepare.encode import cut_before_end, ending_tokens
from data.text.relevance import ENDING, NOT_RELEVANT, RELEVANT, asked_text, scored_text
from data.text.templates import USER
from engine.blockwise import Blockwise
from engine.objectives.token_choice import TokenChoice
from engine.step import to_micro_batch
from model.formats.answering import ANSWERS_FILE
from model.loss import LossSettings
from settings.declared import Config, DataConfig, T5ModelConfig
from settings.errors import UserError
from settings.fields import AUTO, Auto, counted, listed
from settings.tasks import MODEL_HEADS
from support.storage import read_text
from tasks.label_outputs import EncodedText
from training.loaded_model import LoadedModel
from training.saved_model import SavedModel
from training.setup.answer_list import answer_sources, read_list

DEFAULT_ANSWERS = f"{RELEVANT},{NOT_RELEVANT}"  # Those of monoT5, for a model whose folder has no list.
NUM_ANSWERS = 2
Answers = tuple[str, str]  # What a T5 says of a document that answers the query, and of another one.


class DocumentScorer(Protocol):
    """Scores documents, in batches of like length that the budget holds."""

    beside_bytes: int

    def encode_document(self, query: str, document: str, longest: int) -> EncodedText:
        """A query with a document as the model was trained on them, at most `longest` tokens; of a longer one the end
        of the document is left out.
        """
        ...

    def scores(self, texts: Sequence[EncodedText]) -> list[float]:
        """The scores of encoded documents, in their order; a higher one is more relevant.

        Raises:
            DoesNotFit: the budget does not hold a document.
        """
        ...

    def share_of(self, score: float) -> float:
        """A score as other servers give it: a probability where it is the logarithm of one, else itself."""
        ...

    def predicted_memory(self, longest: int) -> dict[str, int]:
        """The peak memory for one document of so many tokens: component -> bytes."""
        ...


class AnswerScorer(TextReader):
    """Scores by a T5: the log-probability of the first of two answers, where only these two may come.

    Args:
        answers: for a relevant document, and for another.
    """

    def __init__(self, trained: LoadedModel, data: DataConfig, answers: Answers, rows: int | Auto = AUTO) -> None:
        super().__init__(trained, data, rows)
        tokenizer = trained.tokenizer
        relevant, other = ([*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_prompts(list(answers)))
        # Both answers may begin alike; they are told apart by the first tokens that differ.
        depth = next(index for index, pair in enumerate(zip(relevant, other, strict=False)) if pair[0] != pair[1])
        self._labels = np.array(relevant[: depth + 1], np.int64)
        self._kept = ending_tokens(tokenizer, trained.template, ENDING)
        blockwise = trained.blockwise
        self._blockwise = Blockwise(
            blockwise.model,
            0,
            blockwise.weight_store,
            LossSettings(),
            0.0,
            TokenChoice([relevant[depth], other[depth]]),
            heap=blockwise.heap,
        )

    def encode_document(self, query: str, document: str, longest: int) -> EncodedText:
        tokenizer = self.trained.tokenizer
        template = self.trained.template
        prompt = template.prompt([(USER, asked_text(query, document))])
        (ids,) = tokenizer.encode_prompts([prompt], is_chat=bool(template.jinja))
        cut = cut_before_end(ids, longest, self._kept)
        return EncodedText([*cut.tolist(), tokenizer.eos_id], is_cut=len(cut) < len(ids))

    def scores(self, texts: Sequence[EncodedText]) -> list[float]:
        shape = self.trained.blockwise.model.config
        device = self.trained.device.torch_device

        def scores(numbers: list[int]) -> Iterator[float]:
            rows = [Row(np.array(texts[number].ids, np.int64), self._labels, 0) for number in numbers]
            micro_batch = to_micro_batch(collate(rows, shape.pad_token_id), shape, device)
            (losses,) = self._blockwise.token_losses([micro_batch])
            for of_row in micro_batch.label_rows.split(losses.cpu()):
                yield -float(of_row[-1])

        return self.in_batches([len(text.ids) for text in texts], scores)

    def share_of(self, score: float) -> float:
        return math.exp(score)

    def target_tokens(self, longest: int) -> int:
        return -(-len(self._labels) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


class HeadScorer(Labeller):
    """Scores by a head over labels: its number, or the probability of the second of two classes."""

    rows_flag: ClassVar[str] = "eval_batch_size_per_gpu"

    def encode_document(self, query: str, document: str, longest: int) -> EncodedText:
        return self.encode(scored_text(query, document), longest)

    def scores(self, texts: Sequence[EncodedText]) -> list[float]:
        outputs = np.concatenate([np.zeros((0, self.trained.held_model.shape.num_labels)), *self.outputs(texts)])
        if outputs.shape[1] == 1:
            return [float(number) for number in outputs[:, 0]]
        return [float(share) for share in 1 / (1 + np.exp(outputs[:, 0] - outputs[:, 1]))]

    def share_of(self, score: float) -> float:
        return score


def can_score(shape: T5ModelConfig) -> bool:
    """Whether the head of a model may say how relevant a document is; of a T5 that writes text any may."""
    head = MODEL_HEADS[shape.head]
    return head.writes_text or (head.pools_rows and shape.num_labels in (1, 2))


def refuse_unable(model: SavedModel) -> None:
    """Refuse a model with a head of more than two classes.

    Raises:
        UserError: it has.
    """
    if not can_score(model.shape):
        raise UserError(
            "--model = {folder}, has {count}: {names}; documents are scored by --labels=regression or by two classes, "
            "of which the second is relevant",
            folder=model.folder,
            count=counted(model.shape.num_labels, "label"),
            names=listed(model.shape.label_names),
        )


def answers_of(config: Config, model: SavedModel, default: str | None = DEFAULT_ANSWERS) -> Answers | None:
    """The two answers of a T5, the relevant one first: those of `--answers`, or of the list in the model's folder.

    Args:
        config: with what the model's folder says.
        default: where there is no list; None: then there are none.
    Raises:
        UserError: a list cannot be read, or has other than two answers, where a default is there.
    """
    sources = answer_sources(config.answer.answers, model)
    if not sources and default is not None:
        sources = answer_sources(default, model)
    if not sources:
        return None
    answers = read_list(config, sources, model.tokenizer)
    path = answers.folder / ANSWERS_FILE
    if answers.tree.num_answers == NUM_ANSWERS and path.is_file():
        words = list(dict.fromkeys(read_text(path).splitlines()))
        if len(words) == NUM_ANSWERS:
            return words[0], words[1]
    if default is None:
        return None
    raise UserError(
        "--answers = {files}, has {count}; give two, the one of a relevant document first, such as {example}",
        files=", ".join(str(source.path) for source in sources),
        count=counted(answers.tree.num_answers, "answer"),
        example=DEFAULT_ANSWERS,
    )


def scorer_of(
    trained: LoadedModel, data: DataConfig, answers: Answers | None, rows: int | Auto = AUTO
) -> DocumentScorer:
    """What scores documents with a loaded model.

    Args:
        answers: of a model that writes text. rows: most documents at once; auto: what the budget holds.
    """
    if answers is not None:
        return AnswerScorer(trained, data, answers, rows)
    return HeadScorer(trained, data, rows)
