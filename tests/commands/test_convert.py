from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands.convert import convert
from data.text.templates import Template
from data.tokenizers.backends import LibraryBackend
from data.tokenizers.published import Published, byte_backend
from data.tokenizers.tokenizer import Tokenizer
from model import hf_format
from model.decoding.generation import generate
from model.formats.adapter_folder import read_info
from model.formats.checksums import CHECKSUMS_FILE
from model.t5 import T5
from settings.declared import Config, T5ModelConfig
from settings.errors import UserError
from tests.commands.small import flags_of
from tests.measuring import in_child

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FAMILIES = ("t5", "t5_v1_1", "mt5", "umt5", "byt5")


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


def test_smaller_dtypes_come_near_and_say_how_near(tmp_path: Path) -> None:
    done = convert(settings(GOLDEN / "umt5", tmp_path / "small", dtype="bf16"))
    assert 0.0 < done.difference < 0.05
    assert hf_format.stored_dtype(tmp_path / "small") == done.dtype
    about = json.loads((tmp_path / "small" / "config.json").read_text())
    assert about["dtype"] == str(done.dtype).removeprefix("torch.")
    back = convert(settings(tmp_path / "small", tmp_path / "kept"))
    assert back.difference == 0.0 and back.dtype == done.dtype
    wide = convert(settings(tmp_path / "small", tmp_path / "wide", dtype="fp32"))
    assert wide.difference == 0.0 and wide.dtype == torch.float32


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


@pytest.mark.parametrize(("labels", "names"), [("regression", ["grade"]), ("2", ["yes, always", "no"])])
def test_labels_keep_names_that_no_setting_can_say(labels: str, names: list[str], tmp_path: Path) -> None:
    shape = T5ModelConfig(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_decoder_layers=0, num_heads=2)
    hf_format.save(T5(replace(shape, head="sequence", labels=labels)).initialise(0), tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    published = {str(number): name for number, name in enumerate(names)}
    path.write_text(json.dumps({**json.loads(path.read_text()), "id2label": published}))
    convert(settings(tmp_path / "old", tmp_path / "new"))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["id2label"] == published


def test_what_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="exists"):
        convert(settings(GOLDEN / "t5", tmp_path / "new"))
    shutil.copytree(GOLDEN / "t5", tmp_path / "same")
    with pytest.raises(UserError, match="is the folder that is read"):
        convert(settings(tmp_path / "same", tmp_path / "same", overwrite=True))
    for more in ((), ("older_model", "vocab")):
        for name in more:
            (tmp_path / "new" / name).mkdir()
        with pytest.raises(UserError, match=r"has not written \((older_model, )?thesis.txt.* and is not replaced"):
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "dtype"), [("relu", "keep"), ("gated-gelu", "bf16")])
def test_ctranslate2_converts_and_runs_our_folders(family: str, dtype: str, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    gated = family != "relu"
    shape = T5ModelConfig(
        vocab_size=384,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_heads=2,
        num_layers=2,
        num_decoder_layers=2,
        feed_forward_proj=family,
        tie_word_embeddings=not gated,
        scale_decoder_outputs=not gated,
    )
    model = T5(shape).initialise(3)
    for weight in (model.decoder.blocks[0].feed_forward.wo.weight, model.decoder.blocks[1].attention.o.weight):
        weight.data.mul_(4.0)  # The answers are more than one token over and over.
    backend = byte_backend()
    tokenizer = Tokenizer(Published(LibraryBackend(backend)))
    hf_format.save(model, tmp_path / "ours")
    tokenizer.save(tmp_path / "ours")
    convert(settings(tmp_path / "ours", tmp_path / "plain", dtype=dtype))
    ctranslate2.converters.TransformersConverter(str(tmp_path / "plain")).convert(str(tmp_path / "fast"))
    translator = ctranslate2.Translator(str(tmp_path / "fast"), device="cpu", intra_threads=1, compute_type="float32")

    rows = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_batch(["a river", "runs under a bridge"])]

    def names(ids: list[int]) -> list[str]:
        return [str(backend.id_to_token(number)) for number in ids]

    results = translator.translate_batch([names(row) for row in rows], beam_size=1, max_decoding_length=12)
    expected = generate(hf_format.load(tmp_path / "plain"), rows, max_new_tokens=12)
    assert [result.hypotheses[0] for result in results] == [names(row) for row in expected]


@pytest.mark.slow
def test_memory_of_converting(tmp_path: Path) -> None:
    """The model and a piece of one tensor, pickled or not; the copy that is compared comes after the first has gone."""
    size, peak = in_child(f"""
import contextlib
import sys
from pathlib import Path
from config import T5ModelConfig, load
from model import hf_format
from model.decoding.generation import generate
from model.t5 import T5
from safetensors.torch import load_file
from commands.convert import convert

place = Path("{tmp_path}")
flags = {{"allow_pickle": "True"}}


def convert_named(old, new):
    with contextlib.redirect_stdout(sys.stderr):
        convert(load("convert", {{**flags, "model": str(place / old), "output": str(place / new)}}))


small = T5(T5ModelConfig(vocab_size=64, d_model=16, num_layers=1, num_decoder_layers=1)).initialise(0)
hf_format.save(small, place / "small")
convert_named("small", "small_new")
model = T5(T5ModelConfig(vocab_size=32000, num_layers=3, num_decoder_layers=3)).initialise(0)
size = sum(weight.nbytes for weight in model.parameters())
hf_format.save(model, place / "old")
torch.save(load_file(place / "old/model.safetensors"), place / "old/pytorch_model.bin")
(place / "old/model.safetensors").unlink()
del model
print(size, measure(lambda: convert_named("old", "new")))
""")
    assert 0.5 * size < peak < size + 2**24
