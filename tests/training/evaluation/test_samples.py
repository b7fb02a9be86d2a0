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
def test_runs_decode_as_the_published_model(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "say", "response": "aa"}\n' * 8)
    flags = {
        "train_file": rows,
        "validation_file": rows,
        "objective": "pairs",
        "tokenizer_type": "byte",
        "learning_rate": 1e-2,
        "dropout_rate": 0.0,
        "eval_generate_rows": 8,
        "metrics": "identical",
        "sample_rows": 1,
    }
    LowMemTrainer(configuration(tmp_path, "said", **flags, max_steps=40, eval_steps=40)).train()
    assert events(tmp_path, "said", "sample")[-1]["answer"] == "aa"
    assert events(tmp_path, "said", "eval")[-1]["identical"] == 100.0
    more = {"is_keep_training": True, "no_repeat_ngram_size": 1, "max_steps": 41, "eval_steps": 41}
    LowMemTrainer(configuration(tmp_path, "said", **flags, **more)).train()
    assert events(tmp_path, "said", "sample")[-1]["answer"] != "aa"
    assert events(tmp_path, "said", "eval")[-1]["identical"] == 0.0
