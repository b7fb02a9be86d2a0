"""Answers within a run: how they are decoded, and what is shown of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from data.tokenizers.training import byte_tokenizer
from tests.training.small_runs import configuration, events
from trainer_low_mem import LowMemTrainer
from training.evaluating import show_samples


def test_half_a_letter_is_not_shown() -> None:
    tokenizer = byte_tokenizer()
    source = np.array([tokenizer.encode_batch(["河水"])[0][:5]])  # a letter has three bytes
    batch = SimpleNamespace(
        num_rows=1, input_ids=source, labels=source, input_lengths=np.array([5]), target_lengths=np.array([5])
    )
    loader = SimpleNamespace(evaluation_batches=lambda *counts: iter([batch]))
    assert "\ufffd" in tokenizer.decode(source[0].tolist())
    run = SimpleNamespace(validation=loader, tokenizer=tokenizer)
    assert show_samples(cast(Any, SimpleNamespace(run=run, train=SimpleNamespace(sample_rows=0)))) == "河"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", [0, 1])
def test_runs_decode_as_the_published_model(tmp_path: Path, size: int) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "say", "response": "aa"}\n' * 8)
    flags = {
        "train_file": rows,
        "validation_file": rows,
        "objective": "pairs",
        "tokenizer_type": "byte",
        "max_steps": 40,
        "eval_steps": 40,
        "learning_rate": 1e-2,
        "dropout_rate": 0.0,
        "eval_generate_rows": 8,
        "metrics": "identical",
        "sample_rows": 1,
        "no_repeat_ngram_size": size,
    }
    LowMemTrainer(configuration(tmp_path, "said", **flags)).train()
    *_, sample = events(tmp_path, "said", "sample")
    assert (sample["answer"] == "aa") == (size == 0)
    assert events(tmp_path, "said", "eval")[-1]["identical"] == (100.0 if size == 0 else 0.0)
