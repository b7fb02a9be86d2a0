"""Folders of sentence-transformers give here the vectors that they give there, and ours there those that they give
here.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.parts.random_models import write_random_model
from data.batches.collate import EmbeddingRow, collate_texts
from data.prepare.encode import TextEncoder
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from engine.blockwise import Blockwise
from engine.objectives.embedding import EmbeddingObjective
from engine.step import to_micro_batch
from engine.weights import weight_store_for
from model import hf_format
from model.formats.mean import write_mean
from model.formats.sentence_transformers import (
    MATRIX,
    TextSettings,
    encoder_folder,
    text_settings,
    write_text_settings,
)
from model.formats.shape_file import read_config
from model.loss import LossSettings
from model.quantization import quantize_model
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.precedence import model_presets
from tests.peer_vectors import ask_sentence_transformers

CPU = torch.device("cpu")
SHORT = TextSettings(40)
TEXTS = ["a river runs under a bridge", "it's 3 o'clock; 中文", "bees " * 40, "x"]
SHAPE = T5ModelConfig(
    vocab_size=384, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, num_decoder_layers=0, head="embedding"
)
# As their config.json and modules.json have it: GTR, sentence-T5 and Instructor have the same parts.
MEAN = {
    "word_embedding_dimension": 32,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}
DENSE = {
    "in_features": 32,
    "out_features": 24,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}
PARTS = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([f"{text} {number}" for number in range(50) for text in TEXTS], "bpe", 384, 2**20)


def written(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def gtr_like(folder: Path, parts: dict[str, str] = PARTS, pickled: tuple[str, ...] = ()) -> Path:
    """A folder with a random T5 encoder, as sentence-transformers 2 has written it, by hand.

    Args:
        parts: module -> its folder. pickled: the folders whose weights are pickles.
    """
    encoder = replace(SHAPE, head="none")
    root = folder / parts["Transformer"]
    write_random_model(root, encoder)
    config = json.loads((root / "config.json").read_text())
    for ours in ("head", "pooling", "head_kind", "embedding_size", "normalize"):
        del config[ours]
    written(root / "config.json", config)
    written(root / "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})
    written(folder / parts["Pooling"] / "config.json", MEAN)
    if "Dense" in parts:
        written(folder / parts["Dense"] / "config.json", DENSE)
        matrix = torch.randn(24, 32, generator=torch.Generator().manual_seed(4)) / 32**0.5
        save_file({"linear.weight": matrix}, folder / parts["Dense"] / "model.safetensors")
    for name in pickled:
        weights = folder / name / "model.safetensors"
        torch.save(load_file(weights), folder / name / "pytorch_model.bin")
        weights.unlink()
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(parts.items())
    ]
    written(folder / "modules.json", modules)
    return folder


def model_with(folder: Path, tokenizer: Tokenizer, texts: TextSettings = SHORT, **head: Any) -> Path:
    """A model of ours with a head, whose bias tables matter."""
    model = T5(replace(SHAPE, **head)).initialise(5)
    for name, weight in model.named_parameters():
        if name.endswith("bias.table"):
            weight.data.normal_(generator=torch.Generator().manual_seed(1))
    hf_format.save(model, folder)
    write_text_settings(folder, texts)
    tokenizer.save(folder)
    return folder


def id_rows(texts: list[str], tokenizer: Tokenizer, longest: int = 40) -> list[NDArray[np.int64]]:
    rows = TextEncoder(tokenizer).encode(texts)
    return [np.append(ids[: longest - 1], tokenizer.eos_id).astype(np.int64) for ids in rows]


def blockwise_of(model: T5) -> Blockwise:
    assert model.embedding_head is not None
    store = weight_store_for(model.embedding.dtype, torch.float32, (model.embedding, model.output_weight))
    return Blockwise(model, 0, store, LossSettings(), 0.0, EmbeddingObjective(model.embedding_head))


def vectors_of(model: T5, rows: list[NDArray[np.int64]]) -> Tensor:
    batch = collate_texts([EmbeddingRow(rows, np.full(1, np.nan, np.float32), 0)], 0)
    (vectors,) = blockwise_of(model).embed([to_micro_batch(batch, model.config, CPU)])
    return vectors


def plain_vectors(model: T5, rows: list[NDArray[np.int64]], matrix: Tensor | None, normalize: bool) -> Tensor:
    """The mean of the states of each text, times a matrix, by torch's plain operations."""
    batch = collate_texts([EmbeddingRow([row], np.full(1, np.nan, np.float32), 0) for row in rows], 0)
    (states,) = blockwise_of(model).encode([to_micro_batch(batch, model.config, CPU)])
    pooled = torch.stack([part.mean(0) for part in states.split(list(map(len, rows)))])
    vectors = pooled if matrix is None else pooled @ matrix.T
    return vectors / vectors.norm(dim=1, keepdim=True) if normalize else vectors


# --- read


@pytest.mark.parametrize("root", ["", "0_Transformer"])
def test_a_folder_like_gtr_gives_its_vectors(root: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = gtr_like(tmp_path / "gtr", {**PARTS, "Transformer": root})
    at = encoder_folder(folder)
    shape = read_config(at)
    model = hf_format.load(at)
    rows = id_rows(TEXTS, tokenizer)
    assert at == folder / root
    assert (shape.head, shape.head_pooling, shape.embedding_size, shape.normalize) == ("embedding", "mean", 24, True)
    assert text_settings(at) == {"max_seq_len": 40}
    expected = plain_vectors(model, rows, load_file(folder / "2_Dense/model.safetensors")["linear.weight"], True)
    torch.testing.assert_close(vectors_of(model, rows), expected)


@pytest.mark.parametrize("left_out", ["Dense", "Normalize"])
def test_matrix_and_length_may_be_absent(left_out: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    parts = {name: path for name, path in PARTS.items() if name != left_out}
    folder = gtr_like(tmp_path / "model", parts)
    model = hf_format.load(folder)
    rows = id_rows(TEXTS, tokenizer)
    matrix = load_file(folder / "2_Dense/model.safetensors")["linear.weight"] if "Dense" in parts else None
    torch.testing.assert_close(vectors_of(model, rows), plain_vectors(model, rows, matrix, "Normalize" in parts))


@pytest.mark.parametrize(
    "pooling, expected",
    [
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "first"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({}, "mean"),
    ],
)
def test_poolings_of_all_versions(pooling: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = gtr_like(tmp_path)
    written(folder / "1_Pooling/config.json", {"embedding_dimension": 32, **pooling})
    assert read_config(folder).head_pooling == expected


@pytest.mark.parametrize("pickled", [("",), ("2_Dense",), ("", "2_Dense")])
def test_pickles_are_read_where_that_is_allowed(pickled: tuple[str, ...], tmp_path: Path) -> None:
    plain = hf_format.load(gtr_like(tmp_path / "plain"))
    folder = gtr_like(tmp_path / "pickled", pickled=pickled)
    with pytest.raises(UserError, match=rf"convert --model={folder} .*--allow_pickle=True"):
        hf_format.load(folder)
    model = hf_format.load(folder, allow_pickle=True)
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_parts_of_instructor_are_known(tmp_path: Path) -> None:
    folder = gtr_like(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "InstructorEmbedding.instructor.INSTRUCTOR_Transformer"
    modules[1]["type"] = "InstructorEmbedding.instructor.INSTRUCTOR_Pooling"
    written(folder / "modules.json", modules)
    written(folder / "1_Pooling/config.json", {**MEAN, "include_prompt": False})
    assert read_config(folder).embedding_size == 24
    assert text_settings(folder) == {"max_seq_len": 40}
    written(folder / "config_sentence_transformers.json", {"prompts": {"query": "Represent the question: "}})
    with pytest.raises(UserError, match="include_prompt"):
        text_settings(folder)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another pooling": (
        "1_Pooling/config.json",
        {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True},
        "max",
    ),
    "two poolings": ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, r"cls \+ mean"),
    "a bias": ("2_Dense/config.json", {"bias": True}, "bias = True"),
    "a bias by default": ("2_Dense/config.json", {"bias": ...}, "bias = True"),
    "an activation": ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Tanh"}, "Tanh"),
    "a residual": ("2_Dense/config.json", {"use_residual": True}, "use_residual"),
    "lower case": ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    "queries of their own length": ("sentence_bert_config.json", {"query_length": 32}, "query_length"),
    "cut vectors": ("config_sentence_transformers.json", {"truncate_dim": 16}, "truncate_dim"),
    "sparse vectors": ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
    "another family": ("config.json", {"model_type": "bert", "architectures": ["BertModel"]}, "bert.* not a T5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_head_is_refused(name: str, tmp_path: Path) -> None:
    file, changes, words = REFUSED[name]
    folder = gtr_like(tmp_path)
    path = folder / file
    content = {**(json.loads(path.read_text()) if path.is_file() else {}), **changes}
    written(path, {key: value for key, value in content.items() if value is not ...})
    with pytest.raises(UserError, match=words) as error:
        read_config(folder)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "kinds, words",
    [
        (["Transformer", "Pooling", "LayerNorm"], "LayerNorm"),
        (["Transformer", "Pooling", "Normalize", "Dense"], "order"),
        (["Transformer", "Pooling", "Dense", "Dense"], "order"),
        (["Transformer"], "order"),
        (["Transformer", "custom_code.Pooling"], "custom_code.Pooling"),
    ],
)
def test_other_modules_are_refused_by_name(kinds: list[str], words: str, tmp_path: Path) -> None:
    folder = gtr_like(tmp_path)
    modules = [
        {"path": PARTS.get(kind, ""), "type": kind if "." in kind else f"sentence_transformers.models.{kind}"}
        for kind in kinds
    ]
    written(folder / "modules.json", modules)
    with pytest.raises(UserError, match=words):
        read_config(folder)


@pytest.mark.parametrize("content", [{}, [], [{"type": "Transformer"}], [{"path": "../x", "type": "a.Transformer"}], 3])
def test_damaged_modules_end_in_a_sentence(content: Any, tmp_path: Path) -> None:
    folder = gtr_like(tmp_path)
    written(folder / "modules.json", content)
    with pytest.raises(UserError, match=r"modules\.json"):
        read_config(folder)


@pytest.mark.parametrize(
    "config, query, document",
    [
        ({"prompts": {"query": "q: ", "document": "d: "}}, "q: ", "d: "),
        ({"prompts": {"query": "q: ", "corpus": "c: ", "passage": "p: "}}, "q: ", "p: "),
        ({"prompts": {"query": "q: ", "document": ""}}, "q: ", None),
        ({"prompts": {"sts": "s: "}, "default_prompt_name": "sts"}, "s: ", "s: "),
        ({"prompts": {"sts": "s: "}}, None, None),
    ],
)
def test_prompts(config: dict[str, Any], query: str | None, document: str | None, tmp_path: Path) -> None:
    folder = gtr_like(tmp_path)
    written(folder / "config_sentence_transformers.json", config)
    settings = text_settings(folder)
    assert (settings.get("query_prompt"), settings.get("document_prompt")) == (query, document)


# --- written


@pytest.mark.parametrize("size, normalize", [(24, True), (0, True), (24, False), (0, False)])
def test_what_is_written_is_read_again(size: int, normalize: bool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = TextSettings(40, "query: ", "passage: ")
    folder = model_with(tmp_path, tokenizer, texts, embedding_size=size, normalize=normalize, pooling="last")
    kinds = [module["type"].rpartition(".")[2] for module in json.loads((folder / "modules.json").read_text())]
    shape = read_config(folder)
    assert kinds == ["Transformer", "Pooling", *["Dense"] * bool(size), *["Normalize"] * normalize]
    assert (shape.head_pooling, shape.embedding_size, shape.normalize) == ("last", size, normalize)
    assert text_settings(folder) == vars(texts)
    assert (MATRIX in dict(hf_format.load(folder).named_parameters())) == bool(size)


def test_modules_stand_over_our_own_keys(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """sentence-transformers keeps our keys of config.json when it saves a model that it has changed."""
    folder = model_with(tmp_path, tokenizer, embedding_size=24)
    modules = json.loads((folder / "modules.json").read_text())
    written(folder / "modules.json", modules[:2])
    shape = read_config(folder)
    assert (shape.embedding_size, shape.normalize) == (0, False)
    assert hf_format.load(folder).config == shape


def test_the_matrix_lies_in_one_place(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = model_with(tmp_path, tokenizer, embedding_size=24)
    assert not [name for name in load_file(folder / "model.safetensors") if "embedding_head" in name]
    assert load_file(folder / "2_Dense/model.safetensors")["linear.weight"].shape == (24, 32)


def test_the_mean_of_checkpoints_has_that_of_their_matrices(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folders = [tmp_path / "1", tmp_path / "2"]
    for seed, folder in enumerate(folders):
        hf_format.save(T5(replace(SHAPE, embedding_size=24)).initialise(seed), folder)
        written(folder / "state/training.json", {})
    target = tmp_path / "mean"
    target.mkdir()
    write_mean(folders, target)
    matrices = [hf_format.load(folder).get_parameter(MATRIX) for folder in folders]
    torch.testing.assert_close(hf_format.load(target).get_parameter(MATRIX), (matrices[0] + matrices[1]) / 2)
    assert not (target / "state").exists()


def test_the_matrix_of_a_model_in_int8_stays_fp32(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = model_with(tmp_path / "model", tokenizer, embedding_size=24)
    model = hf_format.load(folder)
    matrix = model.get_parameter(MATRIX).detach().clone()
    rows = id_rows(TEXTS, tokenizer)
    expected = vectors_of(model, rows)
    quantize_model(model)
    hf_format.save(model, tmp_path / "int8")
    again = hf_format.load(tmp_path / "int8", torch.int8)
    assert torch.equal(again.get_parameter(MATRIX), matrix)
    assert torch.nn.functional.cosine_similarity(vectors_of(again, rows), expected).min() > 0.99


# --- and there


HEADS: dict[str, dict[str, Any]] = {
    "gtr": {"pooling": "mean", "dense": 32, "normalize": True},
    "cut and not normalized": {"pooling": "cls", "dense": 20, "normalize": False},
    "last token": {"pooling": "lasttoken", "dense": None, "normalize": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_folder_from_there_gives_the_same_vectors(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    encoder = model_with(tmp_path / "encoder", tokenizer, head="none")
    prompts = {"query": "query: ", "document": "passage: "}
    folder = tmp_path / "model"
    job = {"encoder": encoder, "folder": folder, "prompts": prompts, "max_seq_length": 40, **HEADS[name]}
    ask_sentence_transformers(tmp_path, do="make", **job)
    _, expected = ask_sentence_transformers(tmp_path, do="vectors", folder=folder, texts=TEXTS)
    assert text_settings(folder) == {"max_seq_len": 40, "query_prompt": "query: ", "document_prompt": "passage: "}
    model = hf_format.load(folder)
    read = Tokenizer.load(folder)
    for side, prompt in (("queries", "query: "), ("documents", "passage: ")):
        ours = vectors_of(model, id_rows([prompt + text for text in TEXTS], read))
        np.testing.assert_allclose(ours, expected[side], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        {"embedding_size": 24},
        {"pooling": "first", "normalize": False},
        {"pooling": "last", "embedding_size": 40, "feed_forward_proj": "gated-gelu", "bias_in_every_layer": True},
    ],
    ids=["mean", "first", "last of a UMT5"],
)
def test_our_folder_gives_the_same_vectors_there(head: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = model_with(tmp_path / "model", tokenizer, TextSettings(40, "query: "), **head)
    job = {"folder": folder, "texts": TEXTS, "copy": tmp_path / "copy"}
    answer, there = ask_sentence_transformers(tmp_path, do="vectors", **job)
    assert answer["max_seq_length"] == 40
    assert answer["prompts"] == {"query": "query: ", "document": ""}
    for read in (folder, tmp_path / "copy"):  # As we have written it, and as sentence-transformers has.
        model = hf_format.load(read)
        settings = text_settings(read)
        assert settings == {"max_seq_len": 40, "query_prompt": "query: "}
        for side, prompt in (("queries", "query: "), ("documents", "")):
            ours = vectors_of(model, id_rows([prompt + text for text in TEXTS], Tokenizer.load(read)))
            np.testing.assert_allclose(ours, there[side], atol=1e-5)


@pytest.mark.slow
def test_the_published_width(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """gtr-t5-base, sentence-t5-base and instructor-base: T5 1.0 base, a matrix of 768 x 768, length 1."""
    base = {**model_presets()["t5-base"], "num_decoder_layers": 0, "head": "none"}
    encoder = tmp_path / "encoder"
    write_random_model(encoder, T5ModelConfig(**base))
    tokenizer.save(encoder)
    folder = tmp_path / "model"
    head = {"pooling": "mean", "dense": 768, "normalize": True}
    ask_sentence_transformers(
        tmp_path, do="make", encoder=encoder, folder=folder, prompts={}, max_seq_length=512, **head
    )
    _, expected = ask_sentence_transformers(tmp_path, do="vectors", folder=folder, texts=TEXTS)
    shutil.rmtree(encoder)
    model = hf_format.load(folder)
    assert model.config.vector_size == 768
    ours = vectors_of(model, id_rows(TEXTS, tokenizer, 512))
    np.testing.assert_allclose(ours, expected["documents"], atol=1e-5)
    hf_format.save(model, tmp_path / "again")
    write_text_settings(tmp_path / "again", TextSettings(512))
    tokenizer.save(tmp_path / "again")
    _, again = ask_sentence_transformers(tmp_path, do="vectors", folder=tmp_path / "again", texts=TEXTS)
    np.testing.assert_allclose(again["documents"], expected["documents"], atol=1e-6)
