"""A sample of rows stands for all of them, with a margin: never shorter than what comes, where it can help it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from config import Config
from data.batches.step_lengths import drawn_lengths
from data.prepare.preparing import prepare
from data.prepare.sampled import TIMES_LONGER, sampled_lengths
from data.shards.store import Manifest
from settings.errors import UserError

Configure = Callable[..., Config]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"prompt": "p" * (1 + at % 90), "response": "r" * (1 + at % 7)} for at in range(900)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf8")
    return tmp_path / "rows.jsonl"


def test_the_sample_is_like_all_rows(configure: Configure, file: Path) -> None:
    config = configure(train_file=file, max_seq_len=64, max_target_len=64)
    sample = sampled_lengths(config)
    assert sample is not None and sample.is_all and sample.longest(config) == (64, 8)
    sources, targets = sample.cut(config)
    assert (len(sources), int(sources.max()), int(targets.max())) == (900, 64, 8)
    manifest = Manifest.of(prepare(config).train_dir)
    facts = manifest.lengths("train")
    assert sources.mean() == pytest.approx(facts["input_ids"]["mean"], rel=0.02)
    assert targets.mean() == pytest.approx(facts["labels"]["mean"], rel=0.02)
    assert sampled_lengths(config) is not None, "also where the tokenizer is known"


def test_a_tokenizer_that_is_not_trained_yet_has_a_stand_in(configure: Configure, tmp_path: Path) -> None:
    words = ["quick", "brown", "foxes", "jump", "over", "lazy", "dogs", "while", "seven", "wizards", "watch"]
    draw = np.random.default_rng(1)
    rows = [{"prompt": " ".join(draw.choice(words, 12)), "response": str(draw.choice(words))} for _ in range(600)]
    path = tmp_path / "words.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf8")
    config = configure(train_file=path, tokenizer_dir="auto", tokenizer_type="bpe", vocab_size=512, max_seq_len=256)
    sample = sampled_lengths(config)
    assert sample is not None and not sample.is_all and len(sample.sources) == 300
    told = Manifest.of(prepare(config).train_dir).lengths("train")["input_ids"]
    assert told["mean"] <= sample.sources.mean() < 1.5 * told["mean"]
    longest = TIMES_LONGER * int(sample.sources.max())
    assert sample.longest(config)[0] == longest >= told["longest"], "others may be longer"


@pytest.mark.parametrize("more, close", [({}, 0), ({"max_samples": 300}, 0), ({"tokenizer_dir": "auto"}, 0.1)])
def test_rows_are_counted_as_they_are_learnt(
    configure: Configure, tmp_path: Path, more: dict[str, object], close: float
) -> None:
    """A conversation is as many rows as it has answers, and a blank one is none."""
    counts = np.random.default_rng(1).integers(0, 6, 900)
    talks = [[[f"question {at}.{turn}?", f"answer {turn}"] for turn in range(count)] for at, count in enumerate(counts)]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in talks), encoding="utf8")
    for expands in (False, True):
        config = configure(train_file=path, max_seq_len=256, vocab_size=400, expand_turns=expands, **more)
        sample = sampled_lengths(config)
        told = prepare(config).counts
        rows = told["train_rows"] + told["validation_rows"]
        assert sample is not None and sample.about_rows == pytest.approx(rows, rel=close)


def test_text_and_shards_have_no_sample(configure: Configure, file: Path, text_file: Path) -> None:
    assert sampled_lengths(configure(train_file=text_file)) is None
    shards = prepare(configure(train_file=file)).train_dir
    assert sampled_lengths(configure(train_file=shards)) is None


def test_a_plan_refuses_files_that_lack_a_column(configure: Configure, text_file: Path, tmp_path: Path) -> None:
    """Also of text, and also those to evaluate with: a run would, after the plan."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "some words"}\n')
    with pytest.raises(UserError, match="column text is missing; columns: body"):
        sampled_lengths(configure(train_file=rows))
    with pytest.raises(UserError, match="column text is missing; columns: body"):
        sampled_lengths(configure(train_file=text_file, validation_file=rows))
    assert sampled_lengths(configure(train_file=text_file, validation_file=text_file)) is None


def test_drawn_steps_hold_the_longest_row() -> None:
    lengths = np.arange(1, 11), np.arange(11, 21)
    drawn = drawn_lengths(lengths, (99, 50), 8)
    again = drawn_lengths(lengths, (99, 50), 8)
    assert drawn.sources.shape == (256, 8) and (drawn.sources == again.sources).all() and not drawn.is_complete
    assert int(drawn.sources.max()) == 99 and int(drawn.targets.max()) == 50
    others = drawn.sources[drawn.sources < 99]
    assert set(others.tolist()) == set(range(1, 11))
    halves = drawn_lengths(lengths, (99, 50), 8, num_processes=2, sorts_rows=True)
    assert halves.sources.shape == (512, 4) and (np.diff(halves.sources[:256], axis=1) >= 0).all()
