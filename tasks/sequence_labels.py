"""A text with one label or number: classification and regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from data.prepare.encode import TextEncoder
from data.prepare.preview import shown, side_row, text_of_ids
from data.sources.files import Source
from data.sources.label_columns import LabelColumns
from data.sources.layouts import Columns
from data.task import ShardFormat, Table
from data.text.labels import label_of
from data.tokenizers.backends import Ids
from data.tokenizers.tokenizer import Tokenizer
from language import say
from settings.declared import DataConfig
from tasks.labelled import MASKED, Labelled


class TextLabel(LabelColumns):
    """A column of texts and one of their labels."""

    def labels(self, text: str, cell: object, mask: object) -> list[str | None]:
        return label_of(cell, mask)


class SequenceLabels(Labelled):
    # From a file to a batch.

    # The number of a name, -100 where none is trained; or what is predicted itself, NaN where it is not.
    shards = ShardFormat("sequence", ("input_ids", "labels"), label_column="labels")

    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns:
        return TextLabel((data.text_column,), label=data.label_column)

    def placed(self, encoder: TextEncoder, text: str, labels: Sequence[str | None]) -> tuple[Ids, Sequence[str | None]]:
        return encoder.encode([text])[0], labels

    def show_words(self, labels: Sequence[str | None]) -> tuple[str, str]:
        return say("label"), shown(labels[0] or MASKED)

    def show(self, tokenizer: Tokenizer, ids: NDArray[Any], labels: Sequence[str | None]) -> Table:
        text = text_of_ids(tokenizer, ids)
        return [side_row(0, text, len(ids)), (say("label"), labels[0] or MASKED)]

    # From a batch to a score.
