"""A model's own settings of how it answers: kept by a run, heeded by every command, and by transformers alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.answering import find_answering
from commands.merge import merge
from data.tokenizers.tokenizer import Tokenizer
from model import hf_format
from model.decoding.generation import generate
from model.formats.answering import GENERATION_FILE, answers_by, keep_answers
from settings.declared import Config, GenerateConfig
from settings.errors import UserError
from settings.loading import load
from tests.commands.test_chat import save_adapter
from tests.training.setups import started
from tests.training.small_runs import SMALL
from tests.training.small_trained import SHAPE, save_trained
from trainer_low_mem import LowMemTrainer
from training.saved_model import SavedModel

pytestmark = pytest.mark.usefixtures("one_thread")
SEARCH = GenerateConfig(num_beams=4, length_penalty=0.6, early_stopping="never", no_repeat_ngram_size=2)
KEPT = {"num_beams": 4, "length_penalty": 0.6, "early_stopping": "never", "no_repeat_ngram_size": 2}


def settings(command: str = "generate", **flags: Any) -> Config:
    return load(command, {name: str(value) for name, value in flags.items()})


def how(config: Config, names: tuple[str, ...] = tuple(KEPT)) -> dict[str, Any]:
    return {name: getattr(config.generate, name) for name in names}


def begun(**flags: Any) -> Config:
    """The settings of a training run once its base is known."""
    return started(settings("train", **flags)).config


def with_answers_of(config: Config, model: SavedModel, command: str = "generate") -> Config:
    adapter = str(model.adapters[0]) if model.adapters else None
    named = config.changed(model=str(model.folder), adapter=adapter)
    return find_answering(named, command).config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_trained(tmp_path / "model")


def test_what_is_kept_is_read_again_beside_the_tokens(folder: Path) -> None:
    before = json.loads((folder / GENERATION_FILE).read_text())
    keep_answers(folder, GenerateConfig(max_new_tokens=7, temperature=0.5))
    assert json.loads((folder / GENERATION_FILE).read_text()) == {**before, "max_new_tokens": 7}
    keep_answers(folder, SEARCH)
    assert json.loads((folder / GENERATION_FILE).read_text()) == {**before, **KEPT, "max_new_tokens": 128}
    assert answers_by(folder) == ({**KEPT, "max_new_tokens": 128}, [])
    keep_answers(folder, SEARCH, SEARCH.num_beams)
    asked = [
        with_answers_of(settings(**flags), SavedModel.read(folder), command)
        for flags, command in (({}, "evaluate"), ({}, "generate"), ({"num_beams": 2}, "evaluate"))
    ]
    assert [config.answer.num_answers for config in asked] == [SEARCH.num_beams, 1, 1], (
        "evaluate alone scores them, if it has the beams"
    )
    assert answers_by(folder / "nowhere") == ({}, [])


def test_transformers_answers_by_it_as_this_program_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    # its cache has as many layers as the encoder
    folder = save_trained(tmp_path / "model", shape=replace(SHAPE, num_layers=2))
    keep_answers(folder, SEARCH)
    ids = Tokenizer.load(folder).encode_batch(["what flows below the bridge?"])[0].tolist()
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    expected = theirs.generate(torch.tensor([[*ids, 1]]), max_new_tokens=12)[0].tolist()
    config = with_answers_of(settings(max_new_tokens=12), SavedModel.read(folder))
    (answer,) = generate(hf_format.load(folder), [[*ids, 1]], config.generate)
    (greedy,) = generate(hf_format.load(folder), [[*ids, 1]], GenerateConfig(max_new_tokens=12))
    assert answer == [token for token in expected[1:] if token not in (0, 1)] != greedy


def test_flags_go_before_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_answers(folder, SEARCH)
    assert how(with_answers_of(settings(), SavedModel.read(folder))) == KEPT
    assert "--num_beams=4, --length_penalty=0.6" in capsys.readouterr().err
    assert how(with_answers_of(settings(length_penalty=2), SavedModel.read(folder))) == {**KEPT, "length_penalty": 2.0}
    assert "has no effect" not in capsys.readouterr().err
    plain = how(GREEDY := Config())
    for flags in ({"num_beams": 1}, {"temperature": 0.7}):
        assert how(with_answers_of(settings(**flags), SavedModel.read(folder))) == {**plain, "no_repeat_ngram_size": 2}
    greedy = with_answers_of(GREEDY, SavedModel.read(folder), "serve")
    assert how(greedy) == {**plain, "no_repeat_ngram_size": 2}
    capsys.readouterr()
    (folder / GENERATION_FILE).unlink()
    with pytest.raises(UserError, match=r"--length_penalty = 2\.0, has no effect without --num_beams"):
        with_answers_of(settings(length_penalty=2), SavedModel.read(folder))


DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}


@pytest.mark.parametrize(
    "content, found",
    [
        ({"num_beams": 3, "early_stopping": True}, {"num_beams": 3, "early_stopping": "True"}),
        ({"max_length": 200, "min_length": 30}, {"max_new_tokens": 199, "min_new_tokens": 29}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0, "min_p": 0.0}, {**DRAWN, "temperature": 0.7, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 50, "min_p": 0.1}, {}),
        ({"eos_token_id": [1], "decoder_start_token_id": 0, "pad_token_id": 5, "use_cache": True}, {}),
    ],
)
@pytest.mark.parametrize("file", [GENERATION_FILE, "config.json"])
def test_published_files(tmp_path: Path, file: str, content: dict[str, Any], found: dict[str, Any]) -> None:
    """Settings of config.json count where there is no other file; 20 is what its first versions held by default."""
    (tmp_path / file).write_text(json.dumps(content))
    assert answers_by(tmp_path) == (found, [])
    if file == "config.json":
        (tmp_path / file).write_text('{"max_length": 20}')
        assert answers_by(tmp_path) == ({}, [])
        (tmp_path / GENERATION_FILE).write_text("{}")
        assert answers_by(tmp_path) == ({}, [])


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "cannot be read"),
        ('{"num_beams": "many"}', "num_beams"),
        ('{"eos_token_id": 9}', "config.json"),
        ('{"bad_words_ids": [[5]]}', "bad_words_ids"),
        ('{"do_sample": true, "num_beams": 4}', "num_beams"),
    ],
)
def test_what_nobody_can_write_by_is_refused(folder: Path, tmp_path: Path, text: str, words: str) -> None:
    """Where answers are written; what is finetuned from it answers without."""
    (folder / GENERATION_FILE).write_text(text)
    with pytest.raises(UserError) as caught:
        with_answers_of(settings(), SavedModel.read(folder))
    assert GENERATION_FILE in str(caught.value) and words in str(caught.value)


def test_a_flag_stands_over_what_cannot_be_done_and_unknown_keys_are_mentioned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / GENERATION_FILE).write_text(
        '{"num_beams": 300, "no_repeat_ngram_size": 3, "novel": 1, "do_sample": true}'
    )
    config = with_answers_of(settings(num_beams=2), SavedModel.read(folder))
    assert how(config, ("num_beams", "no_repeat_ngram_size", "temperature")) == {
        "num_beams": 2,
        "no_repeat_ngram_size": 3,
        "temperature": 0.0,
    }
    told = capsys.readouterr().err
    assert "generation_config.json: novel: unknown, ignored" in told
    greedy = with_answers_of(settings(num_beams=1, temperature=0), SavedModel.read(folder))
    assert how(greedy, ("temperature", "top_k", "no_repeat_ngram_size")) == {
        "temperature": 0.0,
        "top_k": 0,
        "no_repeat_ngram_size": 3,
    }


def test_what_is_finetuned_answers_as_its_base(folder: Path, tmp_path: Path) -> None:
    keep_answers(folder, SEARCH)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 4)
    flags = {
        "is_finetune": True,
        "finetune_from": folder,
        "train_file": tmp_path / "pairs.jsonl",
        "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "runs",
        "log_dir": tmp_path / "logs",
        "run_name": "r",
    }
    assert how(begun(**flags)) == KEPT
    assert how(begun(**flags, num_beams=1, lora_rank=2)) == {**KEPT, "num_beams": 1}


def test_a_run_keeps_the_longest_answer_of_its_rows_or_of_its_base(folder: Path, tmp_path: Path) -> None:
    """In a model's folder and an adapter's; bytes are tokens here, and the end token is one more."""
    (folder / GENERATION_FILE).unlink()
    for name, length, base, flags, kept in (
        ("first", 150, folder, {}, 151),
        ("adapter", 160, folder, {"lora_rank": 2}, 161),
    ):
        rows = ({"prompt": f"say {n}", "response": "x" * n} for n in (3, 7, length) for _ in range(4))
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        shape = {name: value for name, value in SMALL.items() if not name.startswith(("d_", "num_", "vocab"))}
        LowMemTrainer(
            settings(
                "train",
                **{
                    **shape,
                    "is_finetune": True,
                    "finetune_from": base,
                    "train_file": tmp_path / "pairs.jsonl",
                    "max_steps": 2,
                    "cache_dir": tmp_path / "cache",
                    "output_dir": tmp_path / "runs",
                    "log_dir": tmp_path / "logs",
                    "run_name": name,
                    "validation_file": tmp_path / "pairs.jsonl",
                    "max_target_len": 256,
                    "num_threads": 1,
                    **flags,
                },
            )
        ).train()
        assert answers_by(tmp_path / "runs" / name)[0]["max_new_tokens"] == kept


def test_an_adapter_goes_before_its_base_also_merged(folder: Path, tmp_path: Path) -> None:
    keep_answers(folder, SEARCH)
    adapter = save_adapter(folder, tmp_path / "adapter", 1)
    Tokenizer.load(folder).save(adapter)
    (adapter / GENERATION_FILE).write_text('{"num_beams": 1}')
    assert how(with_answers_of(settings(), SavedModel.read(folder, str(adapter))), ("num_beams",)) == {
        "num_beams": 1
    }, "a default may be named"
    keep_answers(adapter, GenerateConfig(num_beams=2))
    assert how(with_answers_of(settings(), SavedModel.read(folder, str(adapter)))) == {**KEPT, "num_beams": 2}
    published = json.loads((folder / GENERATION_FILE).read_text())
    (folder / GENERATION_FILE).write_text(json.dumps({**published, "eos_token_id": [1, 9]}))
    merge(settings("merge", model=folder, adapter=adapter, output=tmp_path / "merged"))
    found, problems = answers_by(tmp_path / "merged")
    assert found == {**KEPT, "num_beams": 2, "max_new_tokens": 128}
    assert "eos_token_id = [1, 9], an answer has one end token" in problems[0]
    for path in adapter.glob("tokenizer*"):  # as other programs save adapters
        path.unlink()
    keep_answers(adapter, GenerateConfig(max_new_tokens=9))
    (adapter / "settings.json").write_text('{"max_seq_len": 77}')
    (adapter / "answers.txt").write_text("yes\nno\n")
    merge(settings("merge", model=folder, adapter=adapter, output=tmp_path / "again"))
    assert answers_by(tmp_path / "again")[0]["max_new_tokens"] == 9
    assert "77" in (tmp_path / "again" / "settings.json").read_text()
    assert (tmp_path / "again" / "answers.txt").read_text() == "yes\nno\n"


def test_a_foreign_value_in_the_settings_of_a_run_is_refused_like_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(
        '{"prepare_text": "prott5", "of_another_version": 1, "optimizer": "of_another_version", "max_seq_len": 64}'
    )
    assert SavedModel.read(tmp_path).run_settings == {"prepare_text": "prott5", "max_seq_len": 64}
    path.write_text('{"prepare_text": "evil", "text_column": ["x"], "max_seq_len": -1}')
    with pytest.raises(UserError) as refused:
        _ = SavedModel.read(tmp_path).run_settings
    assert len(refused.value.problems) == 3
    assert f"{path}: prepare_text = evil, " in str(refused.value) and "prott5" in str(refused.value)
