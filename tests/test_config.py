"""Settings: one declaration each, four layers in order, all problems at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from settings.declared import COMMANDS, Config, flags_of, settings_by_name
from settings.edits import Edit, Edits
from settings.errors import UserError
from settings.loading import load, training_command
from settings.precedence import Layered, layered, run_presets
from tests.tasks.presets import preset_settings


def problems_of(command: str, **flags: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(command, flags)
    return caught.value.problems


@pytest.mark.parametrize("preset", [name for name in run_presets() if "head" not in preset_settings(name)])
def test_presets_load(preset: str) -> None:
    """Those of heads are loaded by the tests of their tasks."""
    assert load("train", {"preset": preset, "train_file": "x"}).origins


def test_order_of_the_layers(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("max_steps: 7\nseed: 5\nmodel: {d_ff: 64}\nmodel_preset: t5-small\n")
    loaded = load("train", {"config": str(file), "preset": "sample", "seed": "6"})
    assert loaded.run.seed == 6 and loaded.origin("seed") == "flag"
    assert loaded.train.max_steps == 7 and loaded.origin("max_steps") == "file"
    assert loaded.data.max_seq_len == 256 and loaded.origin("max_seq_len") == "preset"
    assert loaded.model_preset == "t5-small" and loaded.model.d_model == 512
    assert loaded.model.d_ff == 64
    assert loaded.train.log_steps == 10 and loaded.origin("log_steps") is None
    assert loaded.is_set("seed") and loaded.is_set("max_steps") and not loaded.is_set("max_seq_len")


def with_edits(command: str = "train", flags: dict[str, Any] | None = None, **edits: Any) -> Layered:
    """The layers with these lines edited in `config.py`."""
    by_name = {name: Edit(name, value, "config.py", 9) for name, value in edits.items()}
    command_settings = {name: frozenset(flags_of(name)) for name in COMMANDS}
    return layered(command, flags or {}, Config().as_dict(), settings_by_name(), command_settings, Edits(by_name, ()))


def test_an_edited_line_stands_over_a_preset_that_nobody_named_and_under_one_that_is() -> None:
    assert with_edits(d_model=384).values["d_model"] == 384
    assert with_edits(flags={"model_preset": "t5-small"}, d_model=384).values["d_model"] == 512
    assert with_edits(flags={"d_model": "64"}, d_model=384).values["d_model"] == 64
    assert with_edits(epochs=9.0).values["max_steps"] == "auto", "the sample's steps would go before the epochs"
    assert with_edits(train_file="mine.txt").values["max_steps"] == "auto", "the sample is for who has no data"
    assert with_edits().values["max_steps"] == 150
    for flags in ({"train_file": "mine.parquet"}, {"preset": "none"}, {"preset": "sample", "epochs": "2"}):
        assert with_edits(flags=flags).values["max_steps"] == "auto"
    sizes = {"batch_size_per_gpu": 2, "gradient_accumulation_steps": 16}
    assert with_edits(**sizes).values["effective_batch_size"] == "auto", "both sizes go before the sample's rows"
    assert with_edits(batch_size_per_gpu=2).values["effective_batch_size"] == 16
    edited = with_edits(model_preset="t5-base")
    assert edited.model_preset == "t5-base" and edited.origins["model_preset"] == "edited"
    assert not with_edits("evaluate", d_model=384).problems, "a command passes over what it does not take"
    (problem,) = with_edits(batch_size_per_gpu="many").problems
    assert "config.py" in problem and "9" in problem and "batch_size_per_gpu" in problem


def test_files(tmp_path: Path) -> None:
    """YAML reads 1e-4 as text, `no` as False and 1_000 as a number; types come from the declaration. JSON, and
    groups.
    """
    file = tmp_path / "run.yaml"
    file.write_text(
        "learning_rate: 1e-4\nis_finetune: no\nrun_name: 5\nmax_steps: 1_000\nmemory_budget: 6G\ntrain_file: null\n"
    )
    loaded = load("train", {"config": str(file)})
    assert (loaded.train.learning_rate, loaded.train.is_finetune, loaded.run.run_name) == (1e-4, False, "5")
    assert (loaded.train.max_steps, loaded.memory.memory_budget) == (1000, 6 * 2**30)
    file.write_text(json.dumps({"train": {"max_steps": 3}, "run": {"seed": 1}, "max_new_tokens": 5, "d_kv": 16}))
    loaded = load("train", {"config": str(file)})
    assert (loaded.train.max_steps, loaded.run.seed, loaded.model.d_kv) == (3, 1, 16)
    assert load("generate", {"config": str(file)}).generate.max_new_tokens == 5, "a file may serve several commands"
    assert "--learning_rate" in problems_of("generate", learning_rate="1e-3")[0]
    file.write_text("max_stepz: 3\n")
    assert "--max_steps" in problems_of("train", config=str(file))[0]
    missing = problems_of("train", config=str(tmp_path / "none.yaml"), seed="x")
    assert len(missing) == 2 and any("none.yaml" in problem for problem in missing)


def test_round_trip(tmp_path: Path) -> None:
    flags = {"model_preset": "t5-v1.1-small", "memory_budget": "1.3G", "seed": "9", "train_file": "a b,ü"}
    first = load("train", flags)
    first.save(tmp_path / "config.json")
    again = load("train", {"config": str(tmp_path / "config.json")})
    assert again.as_dict() == first.as_dict() != Config().as_dict()
    assert training_command(first.as_dict()) == "train"


@pytest.mark.parametrize(
    ("command", "flags", "names"),
    [
        ("train", dict(is_finetune="true", objective="span"), ["objective"]),
        ("train", dict(metric_for_best="ndcg@10", eval_generate_rows="8", num_answers="5"), ["metric_for_best"]),
        ("train", dict(average_checkpoints="5", keep_latest_n_ckp="4"), ["average_checkpoints"]),
        ("train", dict(head="token", class_weights="1,nan"), ["class_weights"]),
        (
            "generate",
            dict(num_beams="4", temperature="0.5", min_new_tokens="9", max_new_tokens="8"),
            ["num_beams", "min_new_tokens"],
        ),
    ],
)
def test_wrong_together_or_unknown(command: str, flags: dict[str, str], names: list[str]) -> None:
    flags = {"train_file": "x", **flags} if command != "generate" else flags
    assert [problem.split(" = ")[0] for problem in problems_of(command, **flags)] == [f"--{name}" for name in names]


@pytest.mark.parametrize(
    "command, idle, change",
    [
        ("train", {"length_penalty": "2"}, {"num_beams": "4"}),
        ("plan", {"num_answers": "2", "num_beams": "2"}, {"eval_generate_rows": "8"}),
    ],
)
def test_a_flag_that_has_no_effect_beside_the_others_is_refused(
    command: str, idle: dict[str, str], change: dict[str, str]
) -> None:
    assert [problem.split(" = ")[0] for problem in problems_of(command, **idle)] == [f"--{next(iter(idle))}"]
    load(command, {**idle, **change})


def test_what_a_stronger_word_puts_out_of_effect_is_not_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lora_rank: 8\nlora_alpha: 16\nepochs: 3\n")
    load("train", {"config": str(file), "lora_rank": "0", "max_steps": "5"})
    load("generate", {"length_penalty": "2", "top_p": "0.5"})  # A trained model may say the rest.
    file.write_text("lora_alpha: 16\n")
    assert "--lora_alpha" in problems_of("train", config=str(file))[0]
