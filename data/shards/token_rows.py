"""Are the rows of a shard rows of tokens that its tokenizer knows?

Checked at every read, row by row: an id after the vocabulary would end the run in the middle of a step, on a GPU without
a word about where it came from. It costs two passes over some hundred numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.dataset import LowMemDataset
from settings.errors import UserError


class TokenRows(Sequence[dict[str, Any]]):
    """The rows of a split, each checked.

    Args:
        rows: of columns that hold ids. vocab_size: the highest id and 1. place: the split's folder, for messages.
    Raises:
        UserError: there are no rows; on reading one, it holds something else than ids.
    """

    def __init__(self, rows: LowMemDataset, vocab_size: int, place: object) -> None:
        self._rows, self._vocab_size, self._place = rows, vocab_size, place
        if not len(rows):
            raise UserError(f"{place}: holds no rows; delete the folder and prepare it again")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        row = self._rows[index]
        for name, ids in row.items():
            if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "ui":
                raise self._broken(index, f"{name} is {'null' if ids is None else type(ids).__name__}, not token ids")
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
                wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
                raise self._broken(
                    index, f"{name} holds the id {wrong[0]}, the tokenizer has ids 0 to {self._vocab_size - 1:,}"
                )
        return row

    def _broken(self, index: int, problem: str) -> UserError:
        return UserError(f"{self._place}, row {index + 1}: {problem}; delete the folder and prepare it again")
