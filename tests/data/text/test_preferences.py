"""Preferences: two answers a row, read like pairs; rows that teach nothing are refused, counted and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.batches.collate import PreferenceBatch
from data.batches.step_lengths import evaluation_lengths, step_lengths
from data.prepare.preparing import prepare
from settings.errors import UserError
from tests.data.loaders import loader_of

Rows = list[dict[str, str]]


def text_of(ids: np.ndarray) -> str:
    """What the byte tokenizer made ids of, without end of text."""
    assert ids[-1] == 1
    return bytes(int(i) - 3 for i in ids[:-1]).decode()


def write(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def good_rows(count: int = 120) -> Rows:
    return [
        {"prompt": f"p{n} " + "x" * (n % 50), "chosen": f"good {n}", "rejected": f"bad {n}" * 9} for n in range(count)
    ]


@pytest.fixture
def preferences(configure: Any) -> Any:
    """Settings of a preference run on a file."""

    def make(path: Path, **flags: Any) -> Any:
        return configure(train_file=path, max_seq_len=40, max_target_len=30, **flags).changed(objective="preferences")

    return make


def unpacked(batch: PreferenceBatch) -> list[tuple[int, str, str, str]]:
    """Key, prompt, chosen and rejected text of each row."""
    count = batch.num_rows
    answers = [text_of(labels[:length]) for labels, length in zip(batch.labels, batch.target_lengths, strict=True)]
    prompts = [text_of(ids[:length]) for ids, length in zip(batch.input_ids, batch.input_lengths, strict=True)]
    return list(zip(batch.keys.tolist(), prompts, answers[:count], answers[count:], strict=True))


@pytest.mark.parametrize("num_processes", [1, 3])
def test_every_row_comes_once_with_both_answers(preferences: Any, tmp_path: Path, num_processes: int) -> None:
    config = preferences(write(tmp_path / "a.jsonl", good_rows()))
    prepared = prepare(config)
    rows = prepared.counts["train_rows"]
    assert prepared.objective == "preferences" and rows >= 118
    loader = loader_of(prepared.train_dir, "preferences", config)
    assert loader.longest == (40, 9 + 30), "the longest row has both answers in the decoder"
    assert loader.longest_answer == 9, "the chosen one"
    seen = []
    for rank in range(num_processes):
        for batch in loader.micro_batches(
            0, effective_batch_size=rows, batch_size=7, rank=rank, num_processes=num_processes
        ):
            assert isinstance(batch, PreferenceBatch) and batch.reference is None
            assert batch.num_labels == batch.num_rows <= 7 and len(batch.labels) == 2 * batch.num_rows
            for _, prompt, chosen, rejected in unpacked(batch):
                number = int(prompt[1:].split()[0])
                assert chosen == f"good {number}" and rejected == (f"bad {number}" * 9)[:29]
                seen.append(number)
    assert len(seen) == rows == len(set(seen))


def test_reference_log_probabilities_ride_along_with_their_rows(preferences: Any, tmp_path: Path) -> None:
    config = preferences(write(tmp_path / "a.jsonl", good_rows(60)))
    loader = loader_of(prepare(config).train_dir, "preferences", config)
    plain = {
        prompt: number
        for number in range(loader.num_rows)
        for _, prompt, *_ in unpacked(loader.batch_of(np.array([number])))
    }  # type: ignore[arg-type]
    own = np.arange(loader.num_rows)
    loader.attach(np.stack([own, own + 0.5], 1).astype(np.float32))
    for batch in loader.micro_batches(1, effective_batch_size=20, batch_size=6):
        assert isinstance(batch, PreferenceBatch) and batch.reference is not None
        numbers = [plain[prompt] for _, prompt, *_ in unpacked(batch)]
        assert batch.reference.tolist() == [*numbers, *(number + 0.5 for number in numbers)]


def test_the_lengths_of_coming_steps_are_known(preferences: Any, tmp_path: Path) -> None:
    config = preferences(write(tmp_path / "a.jsonl", good_rows(150)))
    prepared = prepare(config)
    loader = loader_of(prepared.train_dir, "preferences", config)
    known = step_lengths(loader, prepared.train_dir, range(3), 8)
    for step in range(3):
        (batch,) = loader.micro_batches(step, effective_batch_size=8, batch_size=8)
        assert known.sources[step].tolist() == batch.input_lengths.tolist()
        assert known.targets[step].tolist() == batch.decoder_lengths.tolist()
        assert int(batch.decoder_lengths.sum() + batch.input_lengths.sum()) == batch.num_tokens
    validation = loader_of(prepared.validation_dir, "preferences", config)
    evaluation, rows = evaluation_lengths(validation, 2), np.arange(min(2, validation.num_rows))
    assert evaluation.targets[0].tolist() == validation.batch_of(rows).decoder_lengths.tolist()


def test_other_column_names(preferences: Any, tmp_path: Path) -> None:
    rows = [{"q": f"p{n}", "better": f"good {n}", "worse": f"bad {n}"} for n in range(9)]
    path = write(tmp_path / "a.jsonl", rows)
    config = preferences(path, prompt_column="q", chosen_column="better", rejected_column="worse")
    loader = loader_of(prepare(config).train_dir, "preferences", config)
    (batch,) = loader.micro_batches(0, effective_batch_size=1, batch_size=1)
    ((_, prompt, chosen, rejected),) = unpacked(batch)  # type: ignore[arg-type]
    assert (chosen, rejected) == (f"good {prompt[1:]}", f"bad {prompt[1:]}")


BAD = {
    "equal": {"prompt": "the question", "chosen": "same\n", "rejected": "same"},
    "empty": {"prompt": "the question", "chosen": "something", "rejected": "  "},
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_teach_nothing_are_counted_and_named(preferences: Any, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.jsonl", [*good_rows(40), BAD[name], BAD[name], *good_rows(5)])
    with pytest.raises(UserError) as caught:
        prepare(preferences(path))
    (problem,) = caught.value.problems
    for words in ("--train_file", "2 rows", str(path), name, "'the question'", "--skip_bad_rows=True"):
        assert words in problem
    prepared = prepare(preferences(path, skip_bad_rows=True))
    assert prepared.counts["train_rows"] + prepared.counts["validation_rows"] == 45
    assert prepared.counts["train_dropped_rows"] == 2


def test_missing_columns_are_named(preferences: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "p", "response": "r"} for _ in range(5)]
    with pytest.raises(UserError, match="chosen") as caught:
        prepare(preferences(write(tmp_path / "a.jsonl", rows)))
    assert "prompt, response" in caught.value.problems[0]


def test_training_on_preferences_says_how(configure: Any, preferences: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", good_rows(20))
    shards = prepare(preferences(path)).train_dir.parent
    for place in (path, shards):
        with pytest.raises(UserError, match="learn them with the dpo command"):
            prepare(configure(train_file=place))
    chosen = prepare(configure(train_file=path, response_column="chosen"))
    assert chosen.objective == "pairs"
    assert prepare(preferences(shards)).objective == "preferences"
