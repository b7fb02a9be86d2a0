"""A text with one label or number: classification and regression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from data.batches.collate import Batch
from data.prepare.encode import TextEncoder
from data.prepare.preview import shown, side_row, text_of_ids
from data.sources.columns import Columns
from data.sources.label_columns import LabelColumns
from data.sources.reading import head_of
from data.sources.relevance import judged_text_columns
from data.sources.source import Source
from data.task import ShardFormat, Table
from data.text.labels import label_of
from data.tokenizers.backends import Ids
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import DataConfig
from support.language import say
from tasks.base import Outputs
from tasks.label_outputs import (
    NO_LABEL,
    EncodedText,
    LabelAnswer,
    LabelOutputs,
    cells,
    predictions,
    probabilities,
)


class TextLabel(LabelColumns):
    """A column of texts and one of their labels."""

    def labels(self, text: str, cell: object, mask: object) -> list[str | None]:
        return label_of(cell, mask)


class SequenceLabels(LabelOutputs):
    # From a file to a batch.

    # The number of a name, -100 where none is trained; or what is predicted itself, NaN where it is not.
    shards = ShardFormat("sequence", ("input_ids", "labels"), label_column="labels")

    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns:
        judged = judged_text_columns(data, head_of(sources[0])) if sources else None
        return judged or TextLabel((data.text_column,), label=data.label_column)

    def ids_and_labels(
        self, encoder: TextEncoder, text: str, labels: Sequence[str | None]
    ) -> tuple[Ids, Sequence[str | None]]:
        return encoder.encode([text])[0], labels

    def show_words(self, labels: Sequence[str | None]) -> tuple[str, str]:
        return say("label"), shown(labels[0] or NO_LABEL)

    def show(self, tokenizer: Tokenizer, ids: NDArray[Any], labels: Sequence[str | None]) -> Table:
        text = text_of_ids(tokenizer, ids)
        return [side_row(0, text, len(ids)), (say("label"), labels[0] or NO_LABEL)]

    # From a batch to a score.

    def labels_of(self, tokens: int) -> int:
        return 1

    def label_column(self, names: Sequence[str]) -> str:
        return "label" if names else "number"

    def encode(self, text: str, encoder: TextEncoder, longest: int, words: int | None = None) -> EncodedText:
        ids = encoder.beginning(text, longest).tolist()
        return EncodedText([*ids[: longest - 1], encoder.tokenizer.eos_id], is_cut=len(ids) == longest)

    def answer(self, text: EncodedText, outputs: Outputs, names: Sequence[str]) -> LabelAnswer:
        """`label` and `probabilities` of all classes, or `number`."""
        if not names:
            (number,) = predictions(outputs, names)
            return LabelAnswer({self.label_column(names): number}, f"{number:.6g}")
        shares = dict(zip(names, probabilities(outputs)[0].tolist(), strict=True))
        label = names[int(outputs[0].argmax())]
        return LabelAnswer({self.label_column(names): label, "probabilities": shares}, f"{label}\t{shares[label]:.4f}")

    def prediction_rows(
        self, batch: Batch, outputs: Outputs, names: Sequence[str], tokenizer: Tokenizer
    ) -> Iterator[dict[str, Any]]:
        columns = cells(batch.labels[:, 0], names), predictions(outputs, names)
        for ids, length, label, predicted in zip(batch.input_ids, batch.input_lengths, *columns, strict=True):
            text = tokenizer.decode_with_unknown(ids[:length])
            yield {"text": text, "label": label, "prediction": predicted}
