"""Samples: what is shown of rows that the longest length has cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from data.tokenizers.training import byte_tokenizer
from training.evaluation.samples import show_samples


def test_half_a_letter_is_not_shown() -> None:
    tokenizer = byte_tokenizer()
    source = np.array([tokenizer.encode_batch(["河水"])[0][:5]])  # a letter has three bytes
    batch = SimpleNamespace(
        num_rows=1, input_ids=source, labels=source, input_lengths=np.array([5]), target_lengths=np.array([5])
    )
    loader = SimpleNamespace(evaluation_batches=lambda *counts: iter([batch]))
    assert "\ufffd" in tokenizer.decode(source[0].tolist())
    nothing = cast(Any, None)
    assert show_samples(nothing, cast(Any, loader), tokenizer, 0, nothing, 9) == "河"
