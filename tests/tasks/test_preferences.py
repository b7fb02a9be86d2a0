"""Preferences: the command `dpo`, the files it reads, its shards and batches, and rows that teach nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.batches.collate import PreferenceBatch
from data.batches.step_lengths import evaluation_lengths, step_lengths
from data.prepare.preparing import prepare
from data.prepare.unread import passed_over
from data.task import shard_readers
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load, training_command
from tests.data.loaders import loader_of
from tests.data.sources.rows import Row, examples_of, write_rows
from training.setup.schedules import Steps


def test_shards_of_preferences_are_read_by_this_task() -> None:
    assert shard_readers()["preferences"].name == "preferences"


def test_the_settings_of_a_run_are_loaded_again_by_dpo_alone(tmp_path: Path) -> None:
    first = load("dpo", {"train_file": "x", "preference_loss": "orpo", "beta": "0.3"})
    first.save(tmp_path / "config.json")
    again = load("dpo", {"config": str(tmp_path / "config.json")})
    assert again.as_dict() == first.as_dict() != Config().as_dict()
    assert training_command(first.as_dict()) == "dpo"
    with pytest.raises(UserError, match=r"^--objective = preferences"):
        load("train", {"config": str(tmp_path / "config.json")})


def test_what_contradicts_dpo_is_refused_at_once() -> None:
    flags = {"train_file": "x", "is_finetune": "True", "label_smoothing": "0.1", "preference_loss": "orpo"}
    with pytest.raises(UserError) as caught:
        load("dpo", flags)
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == ["--is_finetune", "--label_smoothing"]
    load("dpo", {"label_smoothing": "0"})


@pytest.mark.parametrize(("flags", "rate"), [({}, 1e-4), ({"lora_rank": 8}, 1e-3)])
def test_the_rate_that_nobody_named(flags: dict[str, Any], rate: float) -> None:
    config = load("dpo", {"train_file": "x", "model_preset": "tiny"}).with_changes(finetune_from="folder", **flags)
    steps = Steps.of(config.train, config.model, config.lora, config.task, 8, 100)
    assert steps.learning_rate == pytest.approx(rate, rel=0.01)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


HH = "\n\nHuman: q1\n\nAssistant: a1\n\nHuman: q\n\nAssistant: "
LONG = [user("q1"), bot("a1"), user("q")]
SPOKEN = {"chosen": [*LONG, bot("c")], "rejected": [*LONG, bot("r")]}
BOTH = {"chosen": "c", "rejected": "r"}
# a row, the encoder's text, columns that are not used
LAYOUTS: list[tuple[Row, str, str]] = [
    ({"prompt": [user("q")], "chosen": [bot("c")], "rejected": [bot("r")]}, "q", ""),
    ({**SPOKEN, "score": 1.0}, "q1\na1\nq", "score"),
    ({"prompt": "q1", **SPOKEN}, "q1\na1\nq", ""),
    (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "c"},
            "rejected": {"from": "gpt", "value": "r"},
            "system": "s",
        },
        "s\nq",
        "",
    ),
    ({"chosen": f"{HH}c", "rejected": f"{HH}r"}, "q1\na1\nq", ""),
    ({"system": "s", "question": "q", **BOTH}, "s\nq", ""),
    ({"instruction": "i", "input": "x", **BOTH}, "i\nx", ""),
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "prompt", "unused"), LAYOUTS)
def test_a_layout_gives_what_its_documents_say(tmp_path: Path, row: Row, prompt: str, unused: str, ending: str) -> None:
    config, data, usable = examples_of(write_rows(tmp_path / f"a.{ending}", [row]), "dpo")
    assert usable.texts == [(prompt, "c", "r")]
    assert dict(passed_over(config.data, data.task)).get("not used", "") == unused


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (BOTH, "chosen and rejected has no turns, such as Human: and Assistant:"),
        (
            {
                "chosen": [user("q"), bot("a"), *SPOKEN["chosen"]],
                "rejected": [user("q"), bot("b"), *SPOKEN["rejected"]],
            },
            "chosen and rejected do not end with one answer each",
        ),
        (
            {"prompt": "other", "chosen": [user("q"), bot("c")], "rejected": [user("q"), bot("r")]},
            "another question than the prompt",
        ),
        ({"prompt": [bot("q")], **BOTH}, "chosen and rejected stand under no question"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_named(tmp_path: Path, row: Row, words: str) -> None:
    with pytest.raises(UserError, match=words):
        examples_of(write_rows(tmp_path / "a.jsonl", [row]), "dpo")


def good_rows(count: int = 60) -> list[Row]:
    return [
        {"prompt": f"p{n} " + "x" * (n % 50), "chosen": f"good {n}", "rejected": f"bad {n}" * 9} for n in range(count)
    ]


@pytest.fixture
def preferences(configure: Any) -> Any:
    """Settings of a preference run on a file."""

    def make(path: Path, **flags: Any) -> Any:
        return configure(train_file=path, max_seq_len=40, max_target_len=30, **flags).with_changes(
            objective="preferences"
        )

    return make


def text_of(ids: np.ndarray) -> str:
    """What the byte tokenizer made ids of, without end of text."""
    assert ids[-1] == 1
    return bytes(int(i) - 3 for i in ids[:-1]).decode()


def texts_of(batch: PreferenceBatch) -> list[tuple[str, str, str]]:
    """Prompt, chosen and rejected text of each row."""
    answers = [text_of(labels[:length]) for labels, length in zip(batch.labels, batch.target_lengths, strict=True)]
    prompts = [text_of(ids[:length]) for ids, length in zip(batch.input_ids, batch.input_lengths, strict=True)]
    return list(zip(prompts, answers[: len(prompts)], answers[len(prompts) :], strict=True))


def test_every_row_comes_once_with_both_answers_and_what_the_reference_says(preferences: Any, tmp_path: Path) -> None:
    config = preferences(write_rows(tmp_path / "a.jsonl", good_rows()))
    prepared = prepare(config)
    loader = loader_of(prepared.train_dir, "preferences", config)
    rows = loader.num_rows
    assert rows == prepared.counts["train_rows"] >= 58
    assert loader.longest == (40, 8 + 30), "the longest row has both answers in the decoder"
    assert loader.longest_answer == 8, "the chosen one"
    numbers = np.arange(rows)
    (plain,) = loader.micro_batches(0, effective_batch_size=rows, batch_size=rows)
    assert isinstance(plain, PreferenceBatch)
    assert plain.reference is None
    in_order = list[str]()
    for number in range(rows):
        row = loader.batch_of(np.array([number]))
        assert isinstance(row, PreferenceBatch)
        in_order += [prompt for prompt, *_ in texts_of(row)]
    loader.attach(np.stack([numbers, numbers + 0.5], 1).astype(np.float32))
    prompts = list[str]()
    for rank in range(3):
        for batch in loader.micro_batches(0, effective_batch_size=rows, batch_size=7, rank=rank, num_processes=3):
            assert isinstance(batch, PreferenceBatch)
            assert batch.num_labels == batch.num_rows <= 7
            for prompt, chosen, rejected in texts_of(batch):
                number = prompt[1:].split()[0]
                assert (chosen, rejected) == (f"good {number}", (f"bad {number}" * 9)[:29])
                prompts.append(prompt)
            expected = [float(in_order.index(prompt)) for prompt, *_ in texts_of(batch)]
            assert batch.reference is not None
            assert batch.reference.tolist() == [*expected, *(number + 0.5 for number in expected)]
    assert sorted(prompts) == sorted(in_order)


def test_the_lengths_of_coming_steps_are_known(preferences: Any, tmp_path: Path) -> None:
    config = preferences(write_rows(tmp_path / "a.jsonl", good_rows(150)))
    prepared = prepare(config)
    loader = loader_of(prepared.train_dir, "preferences", config)
    lengths = step_lengths(loader, prepared.train_dir, range(3), 8)
    for step in range(3):
        (batch,) = loader.micro_batches(step, effective_batch_size=8, batch_size=8)
        assert lengths.sources[step].tolist() == batch.input_lengths.tolist()
        assert lengths.targets[step].tolist() == batch.decoder_lengths.tolist()
        assert int(batch.decoder_lengths.sum() + batch.input_lengths.sum()) == batch.num_tokens
    validation = loader_of(prepared.validation_dir, "preferences", config)
    rows = np.arange(min(2, validation.num_rows))
    lengths = evaluation_lengths(validation, 2)
    assert lengths.targets[0].tolist() == validation.batch_of(rows).decoder_lengths.tolist()


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"q": "p", "better": "good", "worse": "bad"}])
    flags = {"prompt_column": "q", "chosen_column": "better", "rejected_column": "worse"}
    assert examples_of(path, "dpo", **flags)[2].texts == [("p", "good", "bad")]
    with pytest.raises(UserError, match=r"columns: q, better, worse.*--chosen_column"):
        examples_of(path, "dpo")


@pytest.mark.parametrize(("name", "chosen", "rejected"), [("equal", "same\n", "same"), ("empty", "something", "  ")])
def test_rows_that_teach_nothing_are_counted_and_named(
    preferences: Any, tmp_path: Path, name: str, chosen: str, rejected: str
) -> None:
    bad = {"prompt": "the question", "chosen": chosen, "rejected": rejected}
    path = write_rows(tmp_path / "a.jsonl", [*good_rows(40), bad, bad, *good_rows(5)])
    with pytest.raises(UserError) as caught:
        prepare(preferences(path))
    (problem,) = caught.value.problems
    for words in ("--train_file", "2 rows", str(path), name, "'the question'", "--skip_bad_rows=True"):
        assert words in problem
    counts = prepare(preferences(path, skip_bad_rows=True)).counts
    assert counts["train_rows"] + counts["validation_rows"] == 45
    assert counts["train_dropped_rows"] == 2


def test_training_on_preferences_says_how(configure: Any, preferences: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", good_rows(20))
    shards = prepare(preferences(path)).train_dir.parent
    for source in (path, shards):
        with pytest.raises(UserError, match="learn them with the dpo command"):
            prepare(configure(train_file=source))
    assert prepare(preferences(shards)).objective == "preferences"
    config, data, usable = examples_of(path, response_column="chosen")
    assert data.objective == "pairs"
    assert usable.texts[0] == ("p0 ", "good 0")
    assert dict(passed_over(config.data, data.task))["not used"] == "rejected"
