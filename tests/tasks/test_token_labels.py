"""Labels of words or letters: under their tokens, names in order, nothing cut unasked; their shards and presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.batches.collate import LabelledBatch
from data.dataset import FILE, MMAP, REOPEN, LowMemDataset
from data.prepare.preparing import Prepared, prepare
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load
from tests.data.loaders import loader_of
from tests.data.sources.rows import Row, write_rows
from tests.tasks.presets import presets_of

Configure = Callable[..., Config]
PROTEINS = ["MKVLAC", "ACDW", "WWYLKKKKM", "GGAS"] * 30
STATES = ["CCEEHH", "HHCC", "EEEHHHCCC", "CECH"] * 30


@pytest.fixture
def proteins(tmp_path: Path) -> Path:
    rows: list[Row] = [
        {"sequence": text, "states": states, "mask": "0" + "1" * (len(text) - 1)}
        for text, states in zip(PROTEINS, STATES, strict=True)
    ]
    return write_rows(tmp_path / "proteins.jsonl", rows)


@pytest.fixture
def of_states(tmp_path: Path, proteins: Path) -> Callable[..., Config]:
    def make(**flags: Any) -> Config:
        defaults = {"train_file": proteins, "text_column": "sequence", "label_column": "states", "head": "token"}
        settings = {**defaults, "cache_dir": tmp_path / "cache", **flags}
        return load("train", {name: str(value) for name, value in settings.items()})

    return make


def rows_of(prepared: Prepared, mode: str = FILE) -> list[dict[str, Any]]:
    return list(LowMemDataset(prepared.train_dir, mode=mode))


def test_each_residue_has_its_label_and_masks_hide_some(of_states: Configure) -> None:
    config = of_states()
    prepared = prepare(config)
    assert prepared.labels == ("C", "E", "H")
    assert sum(prepared.label_counts) == prepared.counts["train_tokens"] - 2 * len(rows_of(prepared))
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    assert tokenizer.size == 128, "a token for each amino acid, as in ProtT5"
    first = rows_of(prepared)[0]
    assert tokenizer.decode(first["input_ids"]) == "MKVLAC"
    assert first["labels"].tolist() == [-100, 0, 1, 1, 2, 2, -100]
    for mode in (MMAP, REOPEN):
        same = rows_of(prepared, mode)
        assert all(np.array_equal(a[name], b[name]) for a, b in zip(rows_of(prepared), same, strict=True) for name in a)
    loader = loader_of(prepared.train_dir, prepared.objective, config)
    (batch,) = loader.micro_batches(0, effective_batch_size=4, batch_size=4)
    assert isinstance(batch, LabelledBatch) and batch.labels.shape == batch.input_ids.shape
    assert loader.longest == (10, 0) and batch.num_tokens == batch.input_lengths.sum()
    assert batch.num_labels == (batch.input_lengths - 2).sum()


def test_labels_of_words_go_to_their_first_tokens(configure: Configure, tmp_path: Path) -> None:
    words, labels = ["EU", "rejects", "German", "call"], {0: 1, 3: 0, 11: 2, 18: 0}
    path = write_rows(tmp_path / "words.jsonl", [{"tokens": words, "ner_tags": [3, 0, 7, 0]}] * 20)
    names = {"labels": "0,3,7", "text_column": "tokens", "label_column": "ner_tags"}
    first = rows_of(prepare(configure(train_file=path, head="token", **names)))[0]
    expected = np.full(len(" ".join(words)) + 1, -100)
    expected[list(labels)] = list(labels.values())
    assert first["labels"].tolist() == expected.tolist()


def test_rows_are_cut_only_where_it_is_asked_for(of_states: Configure, proteins: Path) -> None:
    long = write_rows(proteins.with_name("long.jsonl"), [{"sequence": "M" * 8000, "states": "H" * 8000}] * 4)
    prepared = prepare(of_states(train_file=long, labels="C,H"))
    assert len(rows_of(prepared)[0]["input_ids"]) == 8001 and prepared.counts["train_cut_rows"] == 0
    cut = prepare(of_states(max_seq_len=8))
    row = rows_of(cut)[1]  # The second of all is held out.
    assert len(row["input_ids"]) == 8
    assert row["labels"].tolist() == [-100, 1, 1, 2, 2, 2, 0, -100]


def test_wrong_rows_are_told_or_skipped(of_states: Configure, proteins: Path) -> None:
    with pytest.raises(UserError, match="--label_column"):
        prepare(of_states(label_column="other"))
    with proteins.open("a", encoding="utf8") as file:
        file.write('{"sequence": "MKV", "states": "CC"}\n')
    with pytest.raises(UserError, match="line 121"):
        prepare(of_states())
    assert prepare(of_states(skip_bad_rows=True)).counts["train_bad_rows"] == 1


def test_letters_that_share_a_token_are_refused(of_states: Configure) -> None:
    with pytest.raises(UserError, match="--tokenizer_type=letters"):
        prepare(of_states(tokenizer_type="bpe", vocab_size=512))


@pytest.mark.parametrize("preset", presets_of("token"))
def test_presets_load(preset: str) -> None:
    config = load("train", {"preset": preset, "train_file": "x"})
    assert (config.model.head, config.data.objective) == ("token", "token")
