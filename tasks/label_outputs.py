"""What a head over labels gives: loss, scores and answers, shared by labels of texts and of their words or letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL, Batch, LabelledRow, collate_labels, flat_labels
from settings.consistency import CLASS_SCORES, NUMBER_SCORES
from settings.declared import DataConfig, LoraConfig, PreferenceConfig, T5ModelConfig, TrainConfig
from tasks.base import Outputs, Scores, Task, Watch, random_ids, random_keys

if TYPE_CHECKING:
    from data.prepare.encode import TextEncoder
    from data.tokenizers.tokenizer import Tokenizer
    from engine.blockwise import Objective
    from model.t5 import T5

DIGITS = 6  # Of a probability.
UNLABELLED = "-"  # In place of a label that there is not.
Cell = str | float | None  # a name or a number; None: there is none


@dataclass(frozen=True)
class EncodedText:
    """A text for a head over labels.

    Args:
        ids: with end of text.
        is_cut: whether it has more tokens than were asked for.
        places: of the first token of each letter or word that has a label; -1 where it has none. None: the text has one
            label.
    """

    ids: list[int]
    is_cut: bool = False
    places: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class LabelAnswer:
    """What a head says of a text.

    Args:
        columns: of a JSON line.
        shown: on the screen.
    """

    columns: dict[str, Any]
    shown: str


class LabelOutputs(Task):
    """A task whose model has a head over labels."""

    scores: ClassVar[tuple[str, ...]] = (*CLASS_SCORES, *NUMBER_SCORES)
    has_perplexity: ClassVar[bool] = False
    writes_text: ClassVar[bool] = False

    def run_kind(self, is_finetune: bool) -> str:
        return "finetune"

    def leads_to_finetuning(self, is_finetune: bool) -> bool:
        return False

    def origin(self, is_new: bool) -> str:
        return "trained from scratch" if is_new else "finetuned"

    def longest_target(self, data: DataConfig, source_tokens: int, has_decoder: bool) -> int:
        """A decoder reads what the encoder reads."""
        return source_tokens if has_decoder else 0

    def objective(self, model: T5, train: TrainConfig, preference: PreferenceConfig, lora: LoraConfig) -> Objective:
        """Cross-entropy of classes, or the squared error of numbers."""
        from engine.objectives.labels import LabelObjective

        assert model.label_head is not None
        weights = train.class_weights
        classes = None if weights is None else tuple(float(word) for word in weights.split(","))
        return LabelObjective(model.label_head, classes, model.config.dropout_rate)

    def random_batch(
        self, lengths: Sequence[tuple[int, int]], model: T5ModelConfig, random: np.random.Generator, has_reference: bool
    ) -> Batch:
        """Texts with random labels; a decoder reads those that have target tokens."""
        keys = random_keys(random, len(lengths))
        rows = list[LabelledRow]()
        for (source, target), key in zip(lengths, keys, strict=True):
            count = self.labels_of(source)
            labels = random.integers(0, 2, count) if model.label_names else random.random(count, np.float32)
            rows.append(LabelledRow(random_ids(random, model, source), labels, key, target > 0))
        return collate_labels(rows, model.pad_token_id)

    def unlabelled_batch(self, texts: Sequence[EncodedText], model: T5ModelConfig) -> Batch:
        """Texts whose labels are to be predicted."""
        reads_twice = model.num_decoder_layers > 0
        rows = [
            LabelledRow(np.array(text.ids, np.int64), np.zeros(self.labels_of(len(text.ids)), np.int64), 0, reads_twice)
            for text in texts
        ]
        return collate_labels(rows, model.pad_token_id)

    def new_scores(self, names: Sequence[str], write: Watch | None = None) -> Scores:
        from tasks.label_scores import LabelScores

        return LabelScores(names, write)

    def labels_of(self, tokens: int) -> int:
        """How many outputs the head gives for a text of so many tokens, end of text included."""
        raise NotImplementedError

    def column(self, names: Sequence[str]) -> str:
        """The name of what an answer says first; with `names` of classes, else of numbers."""
        raise NotImplementedError

    def encode(self, text: str, encoder: TextEncoder, longest: int, words: int | None = None) -> EncodedText:
        """A text as the model was trained on it.

        Args:
            longest: most tokens with end of text.
            words: how many words the text was joined of; None: it is a text.
        """
        raise NotImplementedError

    def answer(self, text: EncodedText, outputs: Outputs, names: Sequence[str]) -> LabelAnswer:
        """What the head's outputs for a text say; with names they are of classes, else numbers."""
        raise NotImplementedError

    def rows_beside_labels(
        self, batch: Batch, outputs: Outputs, names: Sequence[str], tokenizer: Tokenizer
    ) -> Iterator[dict[str, Any]]:
        """Predictions beside labels, a JSON line for each row of a batch."""
        raise NotImplementedError

    def beside_labels(self, batch: Batch, outputs: Outputs, names: Sequence[str]) -> tuple[str, str]:
        """What is predicted for a batch of a single row, and its labels, both for the screen."""
        labels = cells(flat_labels(batch), names)
        predicted = [
            None if label is None else cell for cell, label in zip(predictions(outputs, names), labels, strict=True)
        ]
        if len(labels) > 1:  # End of text has no label.
            predicted.pop()
            labels.pop()
        return in_line(predicted, names), in_line(labels, names)


def predictions(outputs: Outputs, names: Sequence[str]) -> list[Cell]:
    """The class of each row of outputs, or its number."""
    return cells(outputs.argmax(-1) if names else outputs[:, 0], names)


def cells(labels: NDArray[Any], names: Sequence[str]) -> list[Cell]:
    """Names of classes, or numbers; None where there is no label."""
    if names:
        return [None if label == IGNORED_LABEL else names[label] for label in labels.astype(np.int64).tolist()]
    # As few digits as tell float32 numbers apart:
    return [None if np.isnan(label) else float(str(label)) for label in labels]


def probabilities(outputs: Outputs) -> NDArray[np.float64]:
    """(R, L) of each class, from the head's outputs, as JSON lines have them."""
    powers = np.exp(outputs.astype(np.float64) - outputs.max(-1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(-1, keepdims=True)
    return shares.round(DIGITS)


def in_line(labels: Sequence[Cell], names: Sequence[str]) -> str:
    """Labels for the screen: those of one letter side by side, others between blanks."""
    are_letters = bool(names) and all(len(name) == 1 for name in names)
    words = [f"{label:.4g}" if isinstance(label, float) else label or UNLABELLED for label in labels]
    return ("" if are_letters else " ").join(words)
