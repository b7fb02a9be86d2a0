"""Texts that a model reads without writing any: for vectors and for labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from data.prepare.encode import TextEncoder
from memory.answers import HeldModel, rows_to_measure
from settings.declared import MOST_TOKENS, DataConfig
from settings.fields import AUTO
from training.loaded_model import LoadedModel
from training.saved_model import SavedModel

MOST_ROWS = 64  # at once
MOST_AT_ONCE = 16_384  # tokens
ROUNDED = 64  # Lengths in tokens are rounded up to a multiple of this where rows are planned.
Result = TypeVar("Result")


def text_settings(model: SavedModel, *columns: str) -> dict[str, Any]:
    """How texts are read where the user names nothing: prepared as the model was trained, and not cut.

    Args:
        columns: settings of the run that trained the model which say where the texts are.
    """
    return {"max_seq_len": MOST_TOKENS, **model.settings_of("prepare_text", *columns)}


def text_columns(data: DataConfig, is_named: bool, model: SavedModel) -> list[DataConfig]:
    """Where texts are looked for, first choice first: in the column that is named, else in those that the model was
    trained on.
    """
    names = [data.text_column]
    if not is_named:
        names += [*model.settings_of("prompt_column").values(), DataConfig().text_column]
    return [replace(data, text_column=name, prompt_column=name) for name in dict.fromkeys(names)]


@dataclass
class TextReader:
    """Runs a model over texts, in batches of like length that the budget holds.

    Args:
        longest: most tokens of a text with end of text; longer ones are cut.
        rows: most texts at once; None: what the budget holds.
        beside_bytes: of the budget, for others than this.
    """

    trained: LoadedModel
    encoder: TextEncoder
    longest: int
    rows: int | None = None
    beside_bytes: int = 0
    rows_flag: ClassVar[str] = "eval_batch_size_per_gpu"

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
            count = self._at_once(lengths[order[0]], len(order))
            numbers, order = order[:count], order[count:]
            results.update(zip(numbers, work(numbers), strict=True))
        return [results[row] for row in range(len(lengths))]

    def predict(self, longest: int) -> dict[str, int]:
        """What one text of so many tokens takes at its highest: component -> bytes."""
        return self._held(longest).measuring(1, longest, self._target_tokens(longest))

    def _at_once(self, longest: int, left: int) -> int:
        """How many of the texts that are left fit, of which this is the longest."""
        longest = -(-longest // ROUNDED) * ROUNDED
        asked = AUTO if self.rows is None else min(self.rows, left)
        usual = min(left, max(1, min(MOST_ROWS, MOST_AT_ONCE // longest)))
        sides = longest, self._target_tokens(longest)
        return rows_to_measure(self._held(longest), self.trained.budget.limit(), asked, usual, sides, self.rows_flag)

    def _target_tokens(self, longest: int) -> int:
        """Tokens that a decoder reads of a text of so many."""
        return 0

    def _held(self, longest: int) -> HeldModel:
        held = self.trained.held_model
        return replace(held, base_bytes=held.base_bytes + self.beside_bytes)
