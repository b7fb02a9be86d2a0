"""Settings: one declaration each, four layers in order, all problems at once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import config
from config import COMMANDS, GROUPS, Config, UserError, flags_of, load
from settings.consistency import unheeded
from settings.fields import allowed, parse
from settings.precedence import model_presets, run_presets


def problems_of(command: str, **flags: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(command, flags)
    return caught.value.problems


def test_names_are_unique_across_groups() -> None:
    names = [member.name for cls in GROUPS.values() for member in dataclasses.fields(cls)]  # type: ignore[arg-type]
    assert len(names) == len(set(names))
    assert not {"config", "preset", "model_preset", "help", "h"} & set(names), "the command line takes these itself"


@pytest.mark.parametrize("name", sorted(config.settings_by_name()))
def test_every_default_is_allowed_and_explained(name: str) -> None:
    member = config.settings_by_name()[name][1]
    assert parse(member, member.default) == member.default
    assert member.metadata["help"] and not member.metadata["help"].endswith(".")
    assert allowed(member.metadata)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_flags(command: str) -> None:
    flags = flags_of(command)
    assert {"log_dir", "output_dir"} <= set(flags)
    drawing = ("train", "dpo", "plan", "doctor", "evaluate", "generate", "chat", "serve", "quantize", "demo")
    assert ("seed" in flags) == (command in drawing), "the others draw nothing"
    for wanted in COMMANDS[command]:
        assert wanted in GROUPS or wanted.rpartition(".")[2] in flags, f"{wanted} is neither a group nor a setting"


@pytest.mark.parametrize("preset", run_presets())
def test_presets_load(preset: str) -> None:
    assert load("train", {"preset": preset, "train_file": "x"}).origins


@pytest.mark.parametrize("name", model_presets())
def test_model_presets_load(name: str) -> None:
    loaded = load("train", {"model_preset": name, "train_file": "x"})
    assert loaded.model_preset == name
    for field, value in model_presets()[name].items():
        assert getattr(loaded.model, field) == value


def test_all_problems_at_once() -> None:
    problems = problems_of("train", d_model="0", max_stps="5", learning_rate="fast", device="gpu", noise_density="2")
    assert len(problems) == 5
    text = "\n".join(problems)
    for part in (
        "--d_model = 0",
        "did you mean --max_steps?",
        "--learning_rate = fast",
        "--device = gpu",
        "0.01 to 0.9",
    ):
        assert part in text


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
    assert loaded.given("seed") and loaded.given("max_steps") and not loaded.given("max_seq_len")


def test_nothing_changes_settings_that_are_loaded() -> None:
    loaded = load("train", {"train_file": "x"})
    for group in (None, *GROUPS):
        owner = loaded if group is None else getattr(loaded, group)
        for member in dataclasses.fields(owner):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(owner, member.name, getattr(owner, member.name))
    hash(loaded)  # nothing in it can change
    other = loaded.changed(seed=7, d_ff=64)
    assert (other.run.seed, other.model.d_ff) == (7, 64) != (loaded.run.seed, loaded.model.d_ff)
    assert other.changed(seed=loaded.run.seed, d_ff=loaded.model.d_ff) == loaded


def test_epochs_that_are_named_go_before_the_steps_of_a_preset() -> None:
    assert load("train", {"preset": "sample"}).train.max_steps == 150
    assert load("train", {"preset": "sample", "epochs": "2"}).train.max_steps == "auto"
    assert load("train", {"preset": "sample", "epochs": "2", "max_steps": "9"}).train.max_steps == 9


def test_the_sample_preset_only_without_data() -> None:
    assert load("train").train.max_steps == 150
    assert load("train", {"train_file": "mine.parquet"}).train.max_steps == "auto"
    assert load("train", {"preset": "none"}).train.max_steps == "auto"


def test_yaml_traps(tmp_path: Path) -> None:
    """YAML reads 1e-4 as text, `no` as False and 1_000 as a number; types come from the declaration."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "learning_rate: 1e-4\nis_finetune: no\nrun_name: 5\nmax_steps: 1_000\nmemory_budget: 6G\ntrain_file: null\n"
    )
    loaded = load("train", {"config": str(file)})
    assert loaded.train.learning_rate == 1e-4
    assert loaded.train.is_finetune is False
    assert loaded.run.run_name == "5"
    assert loaded.train.max_steps == 1000
    assert loaded.memory.memory_budget == 6 * 2**30
    assert loaded.data.train_file is None


def test_files_may_be_grouped_and_json(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"train": {"max_steps": 3}, "run": {"seed": 1}, "d_kv": 16}))
    loaded = load("train", {"config": str(file)})
    assert (loaded.train.max_steps, loaded.run.seed, loaded.model.d_kv) == (3, 1, 16)


@pytest.mark.parametrize("content", ["- 1\n- 2\n", "just text", "a: [1", "", "\x00"])
def test_broken_files_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(content)
    assert any("broken.yaml" in problem for problem in problems_of("train", config=str(file)))


def test_missing_file_and_other_problems_together(tmp_path: Path) -> None:
    problems = problems_of("train", config=str(tmp_path / "none.yaml"), seed="x")
    assert any("no such file" in problem for problem in problems) and any(
        "--seed = x" in problem for problem in problems
    )


def test_unknown_name_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("max_stepz: 3\n")
    assert "did you mean --max_steps?" in problems_of("train", config=str(file))[0]


def test_a_file_may_name_settings_of_other_commands(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-3\nmax_new_tokens: 5\n")
    assert load("generate", {"config": str(file)}).generate.max_new_tokens == 5
    assert "--learning_rate" in problems_of("generate", learning_rate="1e-3")[0]


def test_round_trip(tmp_path: Path) -> None:
    first = load(
        "train", {"model_preset": "t5-v1.1-small", "memory_budget": "1.3G", "seed": "9", "train_file": "a b,ü"}
    )
    first.save(tmp_path / "config.json")
    again = load("train", {"config": str(tmp_path / "config.json")})
    assert again.as_dict() == first.as_dict()
    assert Config().as_dict() != first.as_dict()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (dict(effective_batch_size="4", batch_size_per_gpu="8"), "more than effective_batch_size"),
        (dict(effective_batch_size="10", batch_size_per_gpu="2", gradient_accumulation_steps="3"), "no multiple"),
        (dict(vocab_size="3", eos_token_id="3"), "--vocab_size = 3"),
        (dict(is_finetune="true", objective="span"), "finetuning learns pairs"),
        (dict(relative_attention_num_buckets="512"), "--relative_attention_max_distance = 128, must be more than"),
        (dict(model_preset="umt5-small", scale_decoder_outputs="False"), "--scale_decoder_outputs = False"),
        (dict(offload_boundaries="True", memory_mode="standard"), "--offload_boundaries = True"),
        (dict(shard_weights="True", max_grad_norm="1"), "--max_grad_norm = 1.0, needs all gradients at once"),
        (dict(shard_weights="True", mixed_precision="fp16"), "--mixed_precision = fp16, scales the loss"),
        (
            dict(shard_weights="True", eval_generate_rows="8"),
            "--eval_generate_rows = 8, is written by each process for itself",
        ),
        (dict(shard_weights="True", lora_rank="4"), "--shard_weights = True, is for training all weights"),
        (dict(preset="smaple"), "--preset = smaple"),
        (dict(model_preset="t5-smal"), "t5-small"),
    ],
)
def test_wrong_together_or_unknown(flags: dict[str, str], part: str) -> None:
    assert any(part in problem for problem in problems_of("train", **flags))


def test_ways_of_writing_that_contradict_each_other() -> None:
    told = problems_of("generate", num_beams="4", temperature="0.5", min_new_tokens="9", max_new_tokens="8")
    assert [problem.split(",")[0] for problem in told] == ["--num_beams = 4", "--min_new_tokens = 9"]
    load("generate", {"num_beams": "4", "min_new_tokens": "8", "max_new_tokens": "8"})
    load("generate", {"num_beams": "1", "temperature": "0.5"})


def test_dpo_learns_preferences() -> None:
    loaded = load("dpo", {"train_file": "x", "beta": "0.2"})
    assert loaded.data.objective == "preferences" and loaded.preference.beta == 0.2
    assert config.training_command(loaded.as_dict()) == "dpo"
    assert config.training_command(load("train", {"train_file": "x"}).as_dict()) == "train"
    assert set(flags_of("train")) < set(flags_of("dpo"))


def test_a_dpo_run_loads_as_it_was_saved(tmp_path: Path) -> None:
    loaded = load("dpo", {"train_file": "x", "preference_loss": "orpo", "orpo_lambda": "0.3"})
    loaded.save(tmp_path / "settings.json")
    assert load("dpo", {"config": str(tmp_path / "settings.json")}).as_dict() == loaded.as_dict()
    assert "use dpo instead" in problems_of("train", config=str(tmp_path / "settings.json"))[0]


def test_settings_that_dpo_would_not_heed_are_refused_all_at_once() -> None:
    flags = {
        "is_finetune": "True", "label_smoothing": "0.1", "z_loss": "1e-4", "preference_loss": "orpo", "beta": "0.3",
        "preference_label_smoothing": "0.1",
    }  # fmt: skip
    problems = problems_of("dpo", train_file="x", **flags)
    assert len(problems) == 5 and all("has no effect" in problem for problem in problems)
    assert "see preference_label_smoothing" in "".join(problems)
    assert "--orpo_lambda = 0.3" in problems_of("dpo", train_file="x", orpo_lambda="0.3")[0]
    assert "dpo learns preferences alone" in problems_of("dpo", train_file="x", objective="span")[0]


def test_settings_that_were_saved_name_a_text_column_beside_any_objective(tmp_path: Path) -> None:
    load("train", {"train_file": "x"}).save(tmp_path / "settings.json")
    for flags in ({"objective": "pairs"}, {"objective": "auto", "is_finetune": "True"}, {"is_finetune": "True"}):
        load("train", {"config": str(tmp_path / "settings.json"), **flags})


def test_a_text_column_that_would_do_nothing_is_refused() -> None:
    told = "--text_column = body, has no effect on {what}; leave it out"
    for flags in ({"is_finetune": "True"}, {"objective": "pairs"}):
        assert problems_of("train", train_file="x", text_column="body", **flags) == [told.format(what="pairs")]
    assert problems_of("dpo", train_file="x", text_column="body") == [told.format(what="preferences")]
    assert load("generate", {"text_column": "body"}).data.objective == "auto", "prompts are read from it"


@pytest.mark.parametrize(
    "command, idle, heeded",
    [
        ("train", {"min_letters": "0.9"}, {"clean": "True"}),
        ("train", {"noise_density": "0.5", "is_finetune": "True"}, {"is_finetune": "False"}),
        ("train", {"epochs": "7", "max_steps": "2"}, {"max_steps": "auto"}),
        ("train", {"bf16_rounding": "nearest", "mixed_precision": "no"}, {"mixed_precision": "bf16"}),
        ("train", {"warmup_steps": "50", "max_steps": "2"}, {"max_steps": "50"}),
        ("generate", {"top_p": "0.5"}, {"temperature": "0.7"}),
        ("train", {"length_penalty": "2.0"}, {"num_beams": "4"}),
    ],
)
def test_a_flag_that_changes_nothing_is_told(command: str, idle: dict[str, str], heeded: dict[str, str]) -> None:
    name = next(iter(idle))
    (told,) = unheeded(load(command, idle), command)
    assert told.startswith(f"--{name} = ")
    assert unheeded(load(command, {**idle, **heeded}), command) == unheeded(load(command, {}), command) == []


def test_an_edited_default_goes_before_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes d_model = 384 into config.py means it; flags and files still go first."""
    monkeypatch.setattr("settings.precedence._shipped", lambda: {**Config().as_dict(), "d_model": 500, "max_steps": 7})
    config = load("train", {})
    assert config.model.d_model == Config().model.d_model == 512 and config.origin("d_model") == "edited"
    assert config.model.num_layers == 2 and config.train.max_steps == "auto"
    assert any(note.startswith("d_model = 512, as config.py was edited") for note in config.edited_notes())
    assert load("train", {"d_model": "64"}).model.d_model == 64
    monkeypatch.undo()
    assert load("train", {}).edited_notes() == [] and load("train", {}).model.d_model == 256


def test_fp16_of_a_preset_is_for_gpus() -> None:
    config = load("train", {"preset": "guide_config_1", "train_file": "x"})
    assert config.memory.mixed_precision == "fp16" and config.origin("mixed_precision") == "preset"
