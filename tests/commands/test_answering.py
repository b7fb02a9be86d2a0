"""A model's own settings of how it answers: kept by a run, heeded by every command, and by transformers alike."""

from __future__ import annotations

import json
import shutil
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
from model.formats.answering import GENERATION_FILE, keep_answers, read_answer_settings
from settings.declared import Config, GenerateConfig
from settings.errors import UserError
from tests.commands.small import flags_of, write_rows
from tests.commands.test_chat import save_adapter
from tests.training.small_runs import SMALL
from tests.training.small_trained import SHAPE, save_trained
from trainer_low_mem import LowMemTrainer
from training.saved_model import SavedModel

pytestmark = pytest.mark.usefixtures("one_thread")
SEARCH = GenerateConfig(num_beams=4, length_penalty=0.6, early_stopping="never", no_repeat_ngram_size=2)
KEPT = {"num_beams": 4, "length_penalty": 0.6, "early_stopping": "never", "no_repeat_ngram_size": 2}
PLAIN = {name: getattr(GenerateConfig(), name) for name in KEPT}


def how(config: Config, names: Any = KEPT) -> dict[str, Any]:
    return {name: getattr(config.generate, name) for name in names}


def heeded(model: Path, command: str = "generate", adapter: Path | None = None, **flags: Any) -> Config:
    """The settings of a command once it has found the model."""
    config = flags_of("generate", model=model, adapter=adapter or "none", **flags)
    return find_answering(config, command).config


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A model that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def test_what_is_kept_is_read_again_beside_the_tokens(own: Path) -> None:
    before = json.loads((own / GENERATION_FILE).read_text())
    keep_answers(own, GenerateConfig(max_new_tokens=7, temperature=0.5))
    assert json.loads((own / GENERATION_FILE).read_text()) == {**before, "max_new_tokens": 7}
    keep_answers(own, SEARCH)
    assert json.loads((own / GENERATION_FILE).read_text()) == {**before, **KEPT, "max_new_tokens": 128}
    assert read_answer_settings(own) == ({**KEPT, "max_new_tokens": 128}, [])
    assert read_answer_settings(own / "nowhere") == ({}, [])


# What transformers answers to a question by `SEARCH`.
SEARCHED = [190, 86, 120, 334, 120, 109, 232, 376, 109, 190, 334, 334]


@pytest.fixture
def searching(tmp_path: Path) -> tuple[Path, list[int]]:
    """A model that says how it answers, and a question. The cache of transformers needs stacks of the same size."""
    folder = save_trained(tmp_path / "model", shape=replace(SHAPE, num_layers=2))
    keep_answers(folder, SEARCH)
    return folder, [*Tokenizer.load(folder).encode_batch(["what flows below the bridge?"])[0].tolist(), 1]


def test_it_answers_as_transformers_does(searching: tuple[Path, list[int]]) -> None:
    folder, question = searching
    model = hf_format.load(folder)
    (answer,) = generate(model, [question], heeded(folder, max_new_tokens=12).generate)
    (greedy,) = generate(model, [question], GenerateConfig(max_new_tokens=12))
    assert answer == SEARCHED != greedy


@pytest.mark.slow
def test_transformers_answers_by_it_as_this_program_does(searching: tuple[Path, list[int]]) -> None:
    transformers = pytest.importorskip("transformers")
    folder, question = searching
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(torch.tensor([question]), max_new_tokens=12)[0].tolist()
    assert [token for token in answer[1:] if token not in (0, 1)] == SEARCHED


def test_flags_go_before_it(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_answers(own, SEARCH)
    assert how(heeded(own)) == KEPT and "--num_beams=4, --length_penalty=0.6" in capsys.readouterr().err
    assert how(heeded(own, length_penalty=2)) == {**KEPT, "length_penalty": 2.0}
    assert "has no effect" not in capsys.readouterr().err
    # Without a search, or where there is none, what it says of searching is passed over.
    for config in (heeded(own, num_beams=1), heeded(own, temperature=0.7), heeded(own, "serve")):
        assert how(config) == {**PLAIN, "no_repeat_ngram_size": 2}
    (own / GENERATION_FILE).unlink()
    with pytest.raises(UserError, match=r"--length_penalty = 2\.0, has no effect without --num_beams"):
        heeded(own, length_penalty=2)


DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"max_length": 200, "min_length": 30}, {"max_new_tokens": 199, "min_new_tokens": 29}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0, "min_p": 0.0}, {**DRAWN, "temperature": 0.7, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 50, "min_p": 0.1}, {}),
    ],
)
def test_published_files(tmp_path: Path, content: dict[str, Any], expected: dict[str, Any]) -> None:
    (tmp_path / GENERATION_FILE).write_text(json.dumps(content))
    assert read_answer_settings(tmp_path) == (expected, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"num_beams": "many"}', "num_beams"),
        ('{"do_sample": true, "num_beams": 4}', "num_beams"),
    ],
)
def test_what_nobody_can_write_by_is_refused(own: Path, text: str, words: str) -> None:
    (own / GENERATION_FILE).write_text(text)
    with pytest.raises(UserError, match=words) as refused:
        heeded(own)
    assert GENERATION_FILE in str(refused.value)


def test_a_run_keeps_the_longest_answer_of_its_rows(own: Path, tmp_path: Path) -> None:
    """Bytes are tokens here, and the end token is one more."""
    (own / GENERATION_FILE).unlink()
    rows = ({"prompt": f"say {size}", "response": "x" * size} for size in (3, 7, 150) for _ in range(4))
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    small = {name: value for name, value in SMALL.items() if not name.startswith(("d_", "num_", "vocab"))}
    folders = {name: tmp_path / name for name in ("cache_dir", "output_dir", "log_dir")}
    files = {"finetune_from": own, "train_file": pairs, "validation_file": pairs, **folders}
    run = {"is_finetune": True, "max_steps": 1, "run_name": "r", "max_target_len": 256, "num_threads": 1}
    LowMemTrainer(flags_of("train", **{**small, **files, **run})).train()
    assert read_answer_settings(tmp_path / "output_dir" / "r")[0]["max_new_tokens"] == 151


def test_an_adapter_goes_before_its_base_also_merged(own: Path, tmp_path: Path) -> None:
    keep_answers(own, SEARCH)
    adapter = save_adapter(own, tmp_path / "adapter", 1)
    Tokenizer.load(own).save(adapter)
    (adapter / GENERATION_FILE).write_text('{"num_beams": 1}')
    assert heeded(own, adapter=adapter).generate.num_beams == 1, "a default may be named"
    keep_answers(adapter, GenerateConfig(num_beams=2))
    assert how(heeded(own, adapter=adapter)) == {**KEPT, "num_beams": 2}
    published = json.loads((own / GENERATION_FILE).read_text())
    (own / GENERATION_FILE).write_text(json.dumps({**published, "eos_token_id": [1, 9]}))
    merge(flags_of("merge", model=own, adapter=adapter, output=tmp_path / "merged"))
    settings, problems = read_answer_settings(tmp_path / "merged")
    assert settings == {**KEPT, "num_beams": 2, "max_new_tokens": 128}
    assert "eos_token_id = [1, 9], an answer has one end token" in problems[0]


def test_a_foreign_value_in_the_settings_of_a_run_is_refused_like_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    foreign = {"of_another_version": 1, "optimizer": "of_another_version"}
    path.write_text(json.dumps({"prepare_text": "prott5", "max_seq_len": 64, **foreign}))
    assert SavedModel.read(tmp_path).run_settings == {"prepare_text": "prott5", "max_seq_len": 64}
    path.write_text('{"prepare_text": "evil", "text_column": ["x"], "max_seq_len": -1}')
    with pytest.raises(UserError) as refused:
        _ = SavedModel.read(tmp_path).run_settings
    assert len(refused.value.problems) == 3
    assert f"{path}: prepare_text = evil, " in str(refused.value) and "prott5" in str(refused.value)
