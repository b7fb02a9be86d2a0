"""A text with one label or number: classification and regression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from data.batches.collate import Batch
from tasks.base import Outputs
from tasks.label_outputs import EncodedText, LabelAnswer, LabelOutputs, cells, predictions, probabilities

if TYPE_CHECKING:
    from data.prepare.encode import TextEncoder
    from data.tokenizers.tokenizer import Tokenizer

DIGITS = 6  # of a probability in a JSON line


class SequenceLabels(LabelOutputs):
    # From a file to a batch.

    # From a batch to a score.

    def labels_of(self, tokens: int) -> int:
        return 1

    def column(self, names: Sequence[str]) -> str:
        return "label" if names else "number"

    def encode(self, text: str, encoder: TextEncoder, longest: int) -> EncodedText:
        ids = encoder.beginning(text, longest).tolist()
        return EncodedText([*ids[: longest - 1], encoder.tokenizer.eos_id], is_cut=len(ids) == longest)

    def answer(self, text: EncodedText, outputs: Outputs, names: Sequence[str]) -> LabelAnswer:
        """`label` and `probabilities` of all classes, or `number`."""
        if not names:
            (number,) = predictions(outputs, names)
            return LabelAnswer({self.column(names): number}, f"{number:.6g}")
        shares = dict(zip(names, probabilities(outputs)[0].round(DIGITS).tolist(), strict=True))
        label = names[int(outputs[0].argmax())]
        return LabelAnswer({self.column(names): label, "probabilities": shares}, f"{label}\t{shares[label]:.4f}")

    def rows_beside_labels(
        self, batch: Batch, outputs: Outputs, names: Sequence[str], tokenizer: Tokenizer
    ) -> Iterator[dict[str, Any]]:
        columns = cells(batch.labels[:, 0], names), predictions(outputs, names)
        for ids, length, label, predicted in zip(batch.input_ids, batch.input_lengths, *columns, strict=True):
            text = tokenizer.decode_with_unknown(ids[:length])
            yield {"text": text, "label": label, "prediction": predicted}
