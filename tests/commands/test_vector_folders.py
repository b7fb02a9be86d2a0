"""Commands on folders of sentence-transformers: what is trained from one, converted and merged is one again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from commands.check import check
from commands.convert import convert
from commands.evaluate import evaluate
from commands.merge import merge
from commands.quantize import quantize
from data.batches.collate import EmbeddingRow, collate_texts
from data.tokenizers.training import byte_tokenizer
from engine.blockwise import Blockwise
from engine.objectives.embedding import EmbeddingObjective
from engine.step import to_micro_batch
from engine.weights import WeightStore
from model import hf_format
from model.formats.checksums import damages
from model.formats.sentence_transformers import MATRIX, TextSettings, text_settings, write_text_settings
from model.formats.shape_file import read_config
from model.loss import LossSettings
from model.t5 import T5
from serving.model import Model
from settings.declared import T5ModelConfig
from settings.errors import UserError
from tests.commands.small import flags_of, write_rows
from tests.peer_vectors import ask_sentence_transformers
from tests.training.small_trained import SHAPE
from trainer_low_mem import LowMemTrainer
from training.saved_model import SavedModel
from training.setup.adapters import attach

HEAD = replace(SHAPE, num_decoder_layers=0, head="embedding", embedding_size=12)
PROMPTS = TextSettings(48, "query: ", "passage: ")
WORDS = ["river", "bridge", "valley", "honey", "winter", "letters", "metal", "swallow"]
PARTS = {"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"}
IDS = [np.array([*range(5, 5 + size), 1]) for size in (4, 9, 2)]
STEPS = {
    "head": "embedding",
    "max_steps": 2,
    "save_steps": 1,
    "eval_steps": 2,
    "eval_rows": 4,
    "effective_batch_size": 8,
    "mixed_precision": "no",
    "sample_rows": 0,
    "num_threads": 1,
    "probe": False,
}


@pytest.fixture(autouse=True)
def small_products(one_thread: None) -> Iterator[None]:
    yield


def vector_folder(folder: Path, in_subfolder: bool = False, shape: T5ModelConfig = HEAD) -> Path:
    """A model with a head, as `SentenceTransformer.save` lays one out: with nothing of ours."""
    hf_format.save(T5(shape).initialise(3), folder)
    write_text_settings(folder, PROMPTS)
    byte_tokenizer().save(folder)
    config = json.loads((folder / "config.json").read_text())
    for ours in ("head", "pooling", "head_kind", "embedding_size", "normalize"):
        del config[ours]
    (folder / "config.json").write_text(json.dumps(config))
    if in_subfolder:
        (folder / "0_Transformer").mkdir()
        for path in list(folder.iterdir()):
            if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
                path.rename(folder / "0_Transformer" / path.name)
        modules = json.loads((folder / "modules.json").read_text())
        modules[0]["path"] = "0_Transformer"
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def rows_file(folder: Path) -> Path:
    rows = [
        {"anchor": f"{one} or {other}", "positive": f"{other}, {one}"}
        for one in WORDS
        for other in WORDS
        if one != other
    ]
    return write_rows(folder / "pairs.jsonl", rows)


def trained(folder: Path, name: str, base: Path, **flags: Any) -> Path:
    """A run of two steps from a folder."""
    folders = {f"{kind}_dir": folder / kind for kind in ("output", "log", "cache")}
    files = {"train_file": rows_file(folder), "finetune_from": base, "run_name": name}
    LowMemTrainer(flags_of("train", **{**folders, **files, **STEPS, **flags})).train()
    return folder / "output" / name


def vectors_of(model: T5) -> torch.Tensor:
    assert model.embedding_head is not None
    objective = EmbeddingObjective(model.embedding_head)
    blockwise = Blockwise(model, 0, WeightStore(torch.float32), LossSettings(), 0.0, objective)
    batch = collate_texts([EmbeddingRow(IDS, np.full(1, np.nan, np.float32), 0)], 0)
    (vectors,) = blockwise.embed([to_micro_batch(batch, model.config, torch.device("cpu"))])
    return vectors


@pytest.mark.parametrize("in_subfolder", [False, True])
def test_convert_gives_a_plain_folder(in_subfolder: bool, tmp_path: Path) -> None:
    source = vector_folder(tmp_path / "source", in_subfolder)
    dense = source / "2_Dense"
    torch.save(load_file(dense / "model.safetensors"), dense / "pytorch_model.bin")
    expected = vectors_of(hf_format.load(SavedModel.read(source).base))
    (dense / "model.safetensors").unlink()
    with pytest.raises(UserError, match="allow_pickle"):
        convert(flags_of("convert", model=source, output=tmp_path / "plain"))
    convert(flags_of("convert", model=source, output=tmp_path / "plain", allow_pickle=True))
    assert {path.name for path in (tmp_path / "plain").iterdir()} > PARTS
    assert text_settings(tmp_path / "plain") == vars(PROMPTS)
    assert torch.equal(vectors_of(hf_format.load(tmp_path / "plain")), expected)
    assert not damages(tmp_path / "plain")
    (tmp_path / "plain/2_Dense/model.safetensors").write_bytes(b"x")
    assert len(damages(tmp_path / "plain")) == 1


def test_convert_leaves_the_head_out_where_none_is_asked_for(tmp_path: Path) -> None:
    source = vector_folder(tmp_path / "source")
    convert(flags_of("convert", model=source, output=tmp_path / "encoder", head="none"))
    names = {path.name for path in (tmp_path / "encoder").iterdir()}
    assert names.isdisjoint({*PARTS, "1_Pooling", "2_Dense"})
    assert read_config(tmp_path / "encoder").head == "none"


def test_check_opens_a_folder_with_the_encoder_in_a_subfolder(tmp_path: Path) -> None:
    source = vector_folder(tmp_path / "source", in_subfolder=True)
    assert len(check(flags_of("check", model=source))) == 1


def test_a_run_goes_on_as_its_folder_says(tmp_path: Path) -> None:
    run = trained(tmp_path, "run", vector_folder(tmp_path / "base", in_subfolder=True))
    settings = json.loads((run / "settings.json").read_text())
    names = ("head", "pooling", "embedding_size", "normalize", "max_seq_len", "query_prompt", "document_prompt")
    assert [settings[name] for name in names] == ["embedding", "mean", 12, True, 48, "query: ", "passage: "]
    assert {path.name for path in run.iterdir()} > PARTS
    assert text_settings(run) == vars(PROMPTS)
    files = json.loads((run / "checksums.json").read_text())["files"]
    assert {*PARTS, "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} < files.keys()
    assert not damages(run) and not list(run.glob("state"))
    base = hf_format.load(tmp_path / "base/0_Transformer")
    assert not torch.equal(hf_format.load(run).get_parameter(MATRIX), base.get_parameter(MATRIX))


def test_flags_stand_over_the_folder(tmp_path: Path) -> None:
    flags = {"query_prompt": "q: ", "embedding_size": 8, "normalize": False, "pooling": "last", "max_seq_len": 32}
    run = trained(tmp_path, "run", vector_folder(tmp_path / "base"), **flags)
    shape = read_config(run)
    assert (shape.embedding_size, shape.normalize, shape.pooling) == (8, False, "last")
    assert text_settings(run) == vars(TextSettings(32, "q: ", "passage: "))
    assert load_file(run / "2_Dense/model.safetensors")["linear.weight"].shape == (8, 16)


def test_a_head_over_labels_takes_the_encoder_alone(tmp_path: Path) -> None:
    labelled = write_rows(tmp_path / "labelled.jsonl", [{"text": word, "label": len(word)} for word in WORDS])
    flags = {"train_file": labelled, "head": "sequence", "labels": "regression"}
    run = trained(tmp_path, "run", vector_folder(tmp_path / "base"), **flags)
    assert (read_config(run).head, read_config(run).embedding_size) == ("sequence", 0)
    assert not (run / "modules.json").exists()


def test_a_head_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--head=embedding"):
        trained(tmp_path, "run", vector_folder(tmp_path / "base"), head="text", objective="pairs")


def test_adapters_are_merged_into_a_folder_of_vectors(tmp_path: Path) -> None:
    base = vector_folder(tmp_path / "base")
    run = trained(tmp_path, "run", base, lora_rank=2, learning_rate=0.1)
    assert not (run / "modules.json").exists()
    saved = SavedModel.read(run)
    adapted = hf_format.load(saved.base, expect=saved.shape)
    attach(adapted, [run], base)
    merge(flags_of("merge", adapter=run, output=tmp_path / "merged"))
    merged = hf_format.load(tmp_path / "merged")
    torch.testing.assert_close(vectors_of(merged), vectors_of(adapted), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(vectors_of(merged), vectors_of(hf_format.load(base)), atol=1e-3)
    assert text_settings(tmp_path / "merged") == vars(PROMPTS)


def test_evaluate_reads_rows_with_the_prompts_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = vector_folder(tmp_path / "base")
    graded = [{"sentence1": one, "sentence2": other, "score": len(one) / 9} for one in WORDS for other in WORDS[:2]]
    flags = {
        "validation_file": write_rows(tmp_path / "graded.jsonl", graded),
        "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "runs",
        "log_dir": tmp_path / "logs",
    }
    with_prompts = evaluate(flags_of("evaluate", model=base, **flags)).metrics
    config = json.loads((base / "config_sentence_transformers.json").read_text())
    (base / "config_sentence_transformers.json").write_text(json.dumps({**config, "prompts": {}}))
    without = evaluate(flags_of("evaluate", model=base, **flags)).metrics
    assert with_prompts["spearman"] != without["spearman"]


def test_quantize_keeps_the_dense_layer_and_measures_the_loss(tmp_path: Path) -> None:
    run = trained(tmp_path, "run", vector_folder(tmp_path / "base"))
    folders = {f"{kind}_dir": tmp_path / kind for kind in ("output", "log", "cache")}
    flags = {"model": run, "output": tmp_path / "int8", "validation_file": rows_file(tmp_path), **folders}
    before, after = quantize(flags_of("quantize", **flags))
    assert before.loss > 0 and after.loss == pytest.approx(before.loss, rel=0.1)
    assert text_settings(tmp_path / "int8") == vars(PROMPTS)
    matrix = hf_format.load(tmp_path / "int8", torch.int8).get_parameter(MATRIX)
    assert torch.equal(matrix, hf_format.load(run).get_parameter(MATRIX))


def test_embed_reads_texts_as_the_folder_says(tmp_path: Path) -> None:
    folder = vector_folder(tmp_path / "model", in_subfolder=True)
    long = "river " * 30
    by_name = {name: Model(folder).embed([long], prompt_name=name)[0] for name in ("query", "document", "none")}
    expected = Model(folder, max_seq_len=500).embed([("query: " + long)[:47]], prompt_name="none")[0]
    np.testing.assert_allclose(by_name["query"], expected, atol=1e-6)
    assert np.abs(by_name["query"] - by_name["document"]).max() > 1e-3
    assert np.abs(by_name["query"] - by_name["none"]).max() > 1e-3


@pytest.mark.slow
def test_embed_and_sentence_transformers_give_the_same(tmp_path: Path) -> None:
    run = trained(tmp_path, "run", vector_folder(tmp_path / "base"))
    texts = [*WORDS, " ".join(WORDS)]  # The last one is cut.
    _, there = ask_sentence_transformers(tmp_path, do="vectors", folder=run, texts=texts)
    model = Model(run)
    np.testing.assert_allclose(model.embed(texts, prompt_name="query"), there["queries"], atol=1e-5)
    np.testing.assert_allclose(model.embed(texts, prompt_name="document"), there["documents"], atol=1e-5)
