"""Which model a run starts from, and that it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.tokenizers.training import train_tokenizer
from model.formats.checksums import seal
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load
from tests.training.setups import started
from tests.training.small_trained import SHAPE, save_trained
from training.checkpoints.runs import create_run
from training.report.run_files import SETTINGS_FILE
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


@pytest.mark.parametrize("flags", [{}, {"tokenizer_dir": "{run}", "finetune_from": "none"}])
def test_a_run_does_not_replace_what_it_starts_from(tmp_path: Path, pretrained: Path, flags: dict[str, str]) -> None:
    flags_of_start = {name: value.format(run=pretrained) for name, value in flags.items()}
    config = settings(tmp_path, run_name=pretrained.name, overwrite=True, **flags_of_start)
    with pytest.raises(UserError, match=f"would replace {pretrained}, which this run starts from; choose another name"):
        started(config)
    assert (pretrained / "model.safetensors").is_file()


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
