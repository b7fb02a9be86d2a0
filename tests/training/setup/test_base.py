"""Which model a run starts from, and that it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from data.tokenizers.training import train_tokenizer
from model.formats.checksums import seal
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load
from settings.precedence import run_presets
from tests.training.setups import started
from tests.training.small_trained import SHAPE, save_trained
from training.checkpoints.runs import create_run
from training.report.run_files import SETTINGS_FILE
from training.saved_model import SavedModel
from training.setup.hub import name_on_hub
from training.setup.resuming import resumed_config
from training.setup.start import choose_start

SHAPED = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 2}


WORDS = "the quick brown fox jumps over the lazy dog "


def settings(folder: Path, **flags: object) -> Config:
    """Of finetuning on rows of the words that the tokenizer of `pretrained` was trained on."""
    rows = folder / "rows.jsonl"
    if not rows.is_file():
        rows.write_text(
            json.dumps({"prompt": WORDS, "response": WORDS}) + "\n" + json.dumps({"prompt": "fox", "response": WORDS})
        )
    folders = {"output_dir": folder / "runs", "cache_dir": folder / "cache", "is_finetune": True, "train_file": rows}
    return load("train", {name: str(value) for name, value in {**folders, **flags}.items()})


def save_pretrained(run: Path) -> Path:
    save_trained(run)
    for path in run.glob("tokenizer*"):
        path.unlink()
    train_tokenizer([WORDS * 50], "bpe", 384, 2**20).save(run)
    return run


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    run = save_pretrained(create_run(tmp_path / "runs", "before", "pretrain", objective="span"))
    (run / SETTINGS_FILE).write_text(json.dumps({"train_file": None}))
    return run


def test_the_newest_pretraining_run_is_told_in_full(tmp_path: Path, pretrained: Path) -> None:
    start_folder, notes = choose_start(settings(tmp_path))
    assert start_folder == pretrained
    (line,) = notes
    for part in (
        str(pretrained),
        "its architecture and tokenizer",
        "built-in sample",
        "--finetune_from=none",
        "384 tokens",
    ):
        assert part in line


def test_a_run_that_is_not_finished_is_taken_only_if_it_is_named(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path / "runs", "begun", "pretrain", objective="span")
    checkpoint = save_trained(run_dir / "checkpoints" / "step_00000001")
    seal(checkpoint)
    start_folder, (notes,) = choose_start(settings(tmp_path))
    assert start_folder is None and f"{checkpoint} is not finished" in notes
    assert choose_start(settings(tmp_path, finetune_from=checkpoint)) == (checkpoint, [])
    with pytest.raises(UserError, match="not finished"):
        choose_start(load("dpo", {"output_dir": str(tmp_path / "runs")}))
    classifier = replace(SHAPE, head="sequence", labels="yes,no", num_decoder_layers=0)
    save_trained(create_run(tmp_path / "runs", "labels", "finetune", objective="sequence"), shape=classifier)
    with pytest.raises(UserError, match="labels predicts labels and writes no text"):
        choose_start(load("dpo", {"output_dir": str(tmp_path / "runs")}))
    finetuned = save_trained(create_run(tmp_path / "runs", "older", "finetune", objective="pairs"))
    save_trained(create_run(tmp_path / "runs", "newer", "pretrain", objective="span"))
    assert choose_start(load("dpo", {"output_dir": str(tmp_path / "runs")}))[0] == finetuned


def test_another_shape_than_asked_for_is_not_taken(tmp_path: Path, pretrained: Path) -> None:
    start_folder, notes = choose_start(settings(tmp_path, model_preset="t5-small"))
    assert (
        start_folder is None and "does not match --model_preset=t5-small" in notes[0] and "random weights" in notes[0]
    )
    assert choose_start(settings(tmp_path, **SHAPED))[0] == pretrained


def test_the_newest_run_on_text_of_the_shape_is_taken_and_others_are_passed_over(
    tmp_path: Path, pretrained: Path
) -> None:
    save_trained(create_run(tmp_path / "runs", "pairs", "pretrain", objective="pairs"))
    assert choose_start(settings(tmp_path))[0] == pretrained, "a run on pairs is newer, and no pretraining"
    save_pretrained(create_run(tmp_path / "runs", "text", "pretrain", objective="span"))
    assert choose_start(settings(tmp_path))[0] == tmp_path / "runs" / "text"
    start_folder, (line,) = choose_start(settings(tmp_path, model_preset="chatlm-0.2b"))
    assert start_folder is None and "--model_preset=chatlm-0.2b" in line
    preset = load("train", {"preset": "guide_config_1", "is_finetune": "True", "output_dir": str(tmp_path / "runs")})
    assert choose_start(preset)[0] is None, "a named preset decides the shape"


def test_a_tokenizer_that_does_not_suit_is_taken_only_where_it_is_named(tmp_path: Path, pretrained: Path) -> None:
    """Measured: Chinese rows, and a run whose tokenizer knows no Chinese."""
    rows = tmp_path / "zh.jsonl"
    text = {"prompt": "长江是亚洲第一长河吗？黄河呢？", "response": "是的，长江是亚洲第一长河。"}
    rows.write_text((json.dumps(text, ensure_ascii=False) + "\n") * 200, encoding="utf8")
    start_folder, notes = choose_start(settings(tmp_path, train_file=rows))
    assert (
        start_folder is None
        and "is not used unless named explicitly" in notes[0]
        and "times as many tokens" in notes[0]
    )
    assert choose_start(settings(tmp_path, train_file=rows, finetune_from=pretrained)) == (pretrained, [])


@pytest.mark.parametrize("flags", [{}, {"finetune_from": "{run}"}, {"tokenizer_dir": "{run}", "finetune_from": "none"}])
def test_a_run_does_not_replace_what_it_starts_from(tmp_path: Path, pretrained: Path, flags: dict[str, str]) -> None:
    flags_of_start = {name: value.format(run=pretrained) for name, value in flags.items()}
    config = settings(tmp_path, run_name=pretrained.name, overwrite=True, **flags_of_start)
    with pytest.raises(UserError, match=f"would replace {pretrained}, which this run starts from; choose another run"):
        started(config)
    assert (pretrained / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["google/flan-t5-small", "me/my.model"])
def test_the_way_to_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        choose_start(settings(tmp_path, finetune_from=name))
    notes, folder = str(refused.value), f"models/{name.split('/')[1]}"
    for part in (f"hf download {name} --local-dir {folder}", "HF_ENDPOINT=", "--allow_download=True", "config.json"):
        assert part in notes
    save_trained(Path(folder))
    with pytest.raises(UserError, match=f"{folder} is there; give that"):
        choose_start(settings(tmp_path, finetune_from=name))


def test_a_folder_is_not_taken_for_a_name_on_the_hub() -> None:
    assert name_on_hub("models/ChatLM-mini-Chinese") == "charent/ChatLM-mini-Chinese"
    assert name_on_hub("google/flan-t5-small") == "google/flan-t5-small" and name_on_hub("models/mine") == "OWNER/mine"


def test_a_download_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns: list[list[str]] = []

    def fetch(name: str, local_dir: str, allow_patterns: list[str], revision: None) -> None:
        patterns.append(allow_patterns)
        save_trained(Path(local_dir))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "huggingface_hub.list_repo_files", lambda name, revision: ["model.safetensors", "pytorch_model.bin"]
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    config = settings(tmp_path, finetune_from="google/flan-t5-small", allow_download=True)
    assert choose_start(config) == (Path("models/flan-t5-small"), [])
    assert "*.safetensors" in patterns[0] and not any("bin" in pattern for pattern in patterns[0])
    start = started(settings(tmp_path, finetune_from="hf://google/flan-t5-base"))
    assert start.folder == Path("models/google--flan-t5-base")
    assert start.config.train.finetune_from == str(start.folder)
    with pytest.raises(UserError, match="write hf://OWNER/NAME"):
        choose_start(settings(tmp_path, finetune_from="hf://flan-t5-base"))


def test_a_checkpoint_without_a_decoder_is_refused_by_its_headers(tmp_path: Path) -> None:
    folder = save_trained(tmp_path / "encoder")
    path = folder / "model.safetensors"
    encoder_weights = {name: value for name, value in load_file(path).items() if not name.startswith("decoder.")}
    save_file(encoder_weights, path)
    with pytest.raises(UserError, match=r"--finetune_from = .*has no decoder"):
        started(settings(tmp_path, finetune_from=folder))


def test_a_run_resumed_on_another_machine_reads_its_checkpoints_tokenizer(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path / "runs", "mine", "finetune")
    checkpoint = save_trained(run_dir / "checkpoints" / "step_00000001")
    seal(checkpoint)
    old_tokenizer = tmp_path / "left"
    settings(tmp_path, tokenizer_dir=old_tokenizer, vocab_size=384, **SHAPED).save(run_dir / SETTINGS_FILE)
    for config, expected in (
        (settings(tmp_path), checkpoint),
        (settings(tmp_path, tokenizer_dir=old_tokenizer), old_tokenizer),
    ):
        start = started(resumed_config(config, run_dir), run_dir)
        assert start.folder == checkpoint and start.is_resumed
        assert start.config.data.tokenizer_dir == str(expected)


def test_a_new_model_answers_as_its_base_and_says_so_in_one_line(tmp_path: Path) -> None:
    folder = save_trained(tmp_path / "base")
    (folder / "generation_config.json").write_text('{"split_prompts": 60, "num_beams": 5}')
    for flags, expected in (({}, 60), ({"split_prompts": 0}, 0)):
        start = started(settings(tmp_path, finetune_from=folder, **flags))
        assert (start.config.generate.split_prompts, start.config.generate.num_beams) == (expected, 5)
        (note,) = start.notes
        assert "--num_beams=5" in note and ("--split_prompts=60" in note) is bool(expected)


def test_what_a_model_says_gives_way_to_what_the_user_has_named(tmp_path: Path) -> None:
    """A preset that nobody named does not; one that is named, a file and a flag do."""
    folder = save_trained(tmp_path / "base")
    (folder / "generation_config.json").write_text('{"num_beams": 5, "max_new_tokens": 9}')
    file = tmp_path / "mine.yaml"
    file.write_text("num_beams: 2")
    preset = next(name for name in run_presets() if load("train", {"preset": name}).named("num_beams"))
    of_preset = load("train", {"preset": preset}).generate.num_beams
    for flags, beams in (({}, 5), ({"preset": preset}, of_preset), ({"config": file}, 2), ({"num_beams": 3}, 3)):
        config = settings(tmp_path, finetune_from=folder, head="text", **flags)
        answers, _ = SavedModel.read(folder).answer_settings(config)
        assert config.with_saved(answers).generate.num_beams == beams
        assert config.with_saved(answers).generate.max_new_tokens == 9
