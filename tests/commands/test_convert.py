from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands.convert import convert
from data.text.templates import Template
from data.tokenizers.published import byte_backend
from data.tokenizers.tokenizer import Tokenizer
from model import hf_format
from model.formats.adapter_folder import read_info
from model.formats.checksums import CHECKSUMS_FILE
from settings.declared import Config
from settings.errors import UserError
from tests.commands.small import flags_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def settings(source: Path, output: Path, **flags: object) -> Config:
    return flags_of("convert", model=source, output=output, **flags)


def expected_logits(folder: Path, family: str) -> None:
    """The converted folder gives what transformers said of the original."""
    expected = load_file(GOLDEN / family / "expected.safetensors")
    model = hf_format.load(folder)
    logits = model.logits(expected["input_ids"], model.shift_right(expected["labels"]), expected["attention_mask"])
    assert (logits - expected["logits"]).abs().max() < 1e-4


def pickled(family: str, folder: Path, shards: int = 1, legacy: bool = False) -> Path:
    """A checkpoint as old versions of transformers wrote it."""
    shutil.copytree(GOLDEN / family, folder)
    (folder / "expected.safetensors").unlink()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return folder
    file_of = {}
    for number in range(shards):
        names = sorted(weights)[number::shards]
        file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        torch.save({name: weights[name] for name in names}, folder / file)
        file_of.update(dict.fromkeys(names, file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": file_of}))
    return folder


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_every_family_keeps_its_logits(family: str, tmp_path: Path) -> None:
    done = convert(settings(GOLDEN / family, tmp_path / "new"))
    assert done.difference == 0.0 and done.dtype == torch.float32
    expected_logits(tmp_path / "new", family)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"checksums.json", "config.json", "generation_config.json", "model.safetensors"}
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("shards, legacy", [(1, True), (3, False)])
def test_pickles_are_read_where_that_is_allowed(shards: int, legacy: bool, tmp_path: Path) -> None:
    old = pickled("t5_v1_1", tmp_path / "old", shards, legacy)
    with pytest.raises(UserError, match=r"convert --model=.*--allow_pickle=True"):
        convert(settings(old, tmp_path / "new"))
    convert(settings(old, tmp_path / "new", allow_pickle=True))
    expected_logits(tmp_path / "new", "t5_v1_1")


class Harmful:
    """What a pickle may do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


def test_a_pickle_that_is_a_program_or_broken_is_not_run(tmp_path: Path) -> None:
    old = pickled("t5", tmp_path / "old")
    weights: dict[str, object] = {"shared.weight": Harmful(tmp_path / "harm")}
    torch.save(weights, old / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"holds more than tensors and is not read"):
        convert(settings(old, tmp_path / "new", allow_pickle=True))
    assert not (tmp_path / "harm").exists() and not (tmp_path / "new").exists()
    (old / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"pytorch_model\.bin, is (broken|cut off)"):
        convert(settings(old, tmp_path / "new", allow_pickle=True))


def test_pickled_adapters_are_written_anew_where_that_is_allowed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}
    (old / "adapter_config.json").write_text(json.dumps(about))
    weights = {
        "base_model.model.q.lora_A.weight": torch.randn(2, 8),
        "base_model.model.q.lora_B.weight": torch.randn(8, 2),
    }
    torch.save(weights, old / "adapter_model.bin")
    for refused in (lambda: read_info(old), lambda: convert(settings(old, new))):
        with pytest.raises(UserError, match=r"adapter_model\.bin.*convert --model=.*--allow_pickle=True"):
            refused()
    with pytest.raises(UserError, match="--dtype"):
        convert(settings(old, new, allow_pickle=True, dtype="fp16"))
    convert(settings(old, new, allow_pickle=True))
    written = load_file(new / "adapter_model.safetensors")
    assert written.keys() == weights.keys() and all(torch.equal(written[name], weights[name]) for name in weights)
    assert read_info(new).settings.rank == 2


def test_tokenizer_template_and_generation_settings_come_along(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "byt5", tmp_path / "old")
    (tmp_path / "old" / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (tmp_path / "old" / "generation_config.json").write_text('{"num_beams": 4, "eos_token_id": 9}')
    (tmp_path / "old" / "answers.txt").write_text("yes\nno\n")
    Template.load("chat", "t: ").save(tmp_path / "old")
    assert convert(settings(tmp_path / "old", tmp_path / "new")).tokenizer == 384
    assert (tmp_path / "new" / "answers.txt").read_text() == "yes\nno\n"
    tokenizer = Tokenizer.load(tmp_path / "new")
    assert tokenizer.template == Template.load("chat", "t: ")
    assert tokenizer.encode_batch(["hé"])[0].tolist() == [107, 198, 172]
    assert byte_backend().get_vocab_size() == tokenizer.size
    generation = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert generation == {"num_beams": 4, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}


def test_what_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="exists"):
        convert(settings(GOLDEN / "t5", tmp_path / "new"))
    shutil.copytree(GOLDEN / "t5", tmp_path / "same")
    with pytest.raises(UserError, match="is the folder that is read"):
        convert(settings(tmp_path / "same", tmp_path / "same", overwrite=True))
    with pytest.raises(UserError, match=r"has not written \(thesis.txt.* and is not replaced"):
        convert(settings(GOLDEN / "t5", tmp_path / "new", overwrite=True))
    assert (tmp_path / "new" / "thesis.txt").read_text() == "x"


def test_what_was_converted_before_is_replaced_and_what_was_put_there_is_not(tmp_path: Path) -> None:
    for _ in range(2):
        convert(settings(GOLDEN / "t5", tmp_path / "new", overwrite=True))
    (tmp_path / "new" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"\(thesis.txt\)"):
        convert(settings(GOLDEN / "t5", tmp_path / "new", overwrite=True))
    (tmp_path / "new" / "thesis.txt").unlink()
    (tmp_path / "new" / CHECKSUMS_FILE).write_text("{")
    with pytest.raises(UserError, match=r"checksums\.json, is damaged"):
        convert(settings(GOLDEN / "t5", tmp_path / "new", overwrite=True))
