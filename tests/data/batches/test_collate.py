from __future__ import annotations

import numpy as np

from data.batches.collate import Row, collate


def test_rows_are_padded_to_a_multiple_of_the_longest() -> None:
    rows = [Row(np.array([5, 6, 1]), np.array([7, 1]), 2**64 - 1), Row(np.arange(9), np.array([1]), 3)]
    batch = collate(rows, pad_token_id=0)
    assert batch.input_ids.shape == (2, 16) and batch.labels.shape == (2, 8)
    assert batch.input_ids[0].tolist() == [5, 6, 1] + [0] * 13
    assert batch.labels[0].tolist() == [7, 1] + [-100] * 6
    assert batch.input_lengths.tolist() == [3, 9] and batch.target_lengths.tolist() == [2, 1]
    assert batch.num_rows == 2 and batch.num_tokens == 15
    assert batch.keys.dtype == np.int64 and batch.keys.view(np.uint64).tolist() == [2**64 - 1, 3]
