"""A text with a label for each of its words or letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from data.batches.collate import Batch
from settings.errors import UserError
from tasks.base import Outputs
from tasks.label_outputs import EncodedText, LabelAnswer, LabelOutputs, cells, in_line, predictions, probabilities

if TYPE_CHECKING:
    from data.prepare.encode import TextEncoder
    from data.tokenizers.tokenizer import Tokenizer

DIGITS = 6  # of a probability in a JSON line


class TokenLabels(LabelOutputs):
    # From a file to a batch.

    # From a batch to a score.

    def labels_of(self, tokens: int) -> int:
        return tokens

    def column(self, names: Sequence[str]) -> str:
        return "labels" if names else "numbers"

    def encode(self, text: str, encoder: TextEncoder, longest: int) -> EncodedText:
        """With the places of its words, or of its letters: those of a protein, or of a single word with a token for each."""
        ids, places = encoder.with_places(text)
        if len(places) == 1 < len(text):
            with suppress(UserError):  # Where letters share a token, the word has one label.
                ids, places = encoder.with_places(text, len(text))
        is_cut = len(ids) >= longest
        ids = ids[: longest - 1]
        return EncodedText([*ids.tolist(), encoder.tokenizer.eos_id], is_cut, np.where(places < len(ids), places, -1))

    def answer(self, text: EncodedText, outputs: Outputs, names: Sequence[str]) -> LabelAnswer:
        """`labels` of the words or letters with the probability of each in `probabilities`, or `numbers`; null where none is."""
        assert text.places is not None
        of_tokens = [*predictions(outputs, names), None]  # What has no token, place -1, has no label.
        labels = [of_tokens[place] for place in text.places]
        shown = in_line(labels, names)
        if not names:
            return LabelAnswer({self.column(names): labels}, shown)
        of_tokens = [*probabilities(outputs).max(-1).round(DIGITS).tolist(), None]
        return LabelAnswer(
            {self.column(names): labels, "probabilities": [of_tokens[place] for place in text.places]}, shown
        )

    def rows_beside_labels(
        self, batch: Batch, outputs: Outputs, names: Sequence[str], tokenizer: Tokenizer
    ) -> Iterator[dict[str, Any]]:
        begin = 0
        for ids, length, labels in zip(batch.input_ids, batch.input_lengths.tolist(), batch.labels, strict=True):
            yield {
                "tokens": [tokenizer.id_to_token(number) for number in ids[:length].tolist()],
                "labels": cells(labels[:length], names),
                "predictions": predictions(outputs[begin : begin + length], names),
            }
            begin += length
