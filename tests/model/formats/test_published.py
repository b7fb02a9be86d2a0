"""Configurations as the published checkpoints have them, with the sizes of the golden models put in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.formats.shape_file import read_config
from model.hf_format import load, stored_dtype
from settings.declared import T5ModelConfig
from settings.errors import UserError
from tests.measuring import in_child

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
SIZES = {"d_ff": 40, "d_kv": 5, "d_model": 24, "num_heads": 3, "num_layers": 2, "vocab_size": 50}
OLD_BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
# name -> golden family whose numbers it must give, and the file as published
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "t5, before model_type": (
        "t5",
        {
            "architectures": ["T5WithLMHeadModel"],
            "eos_token_id": 1,
            "pad_token_id": 0,
            "n_positions": 512,
        },
    ),
    "flan-t5": (
        "t5_v1_1",
        {
            "architectures": ["T5ForConditionalGeneration"],
            "classifier_dropout": 0.0,
            "decoder_start_token_id": 0,
            "dense_act_fn": "gelu_new",
            "eos_token_id": 1,
            "feed_forward_proj": "gated-gelu",
            "is_encoder_decoder": True,
            "is_gated_act": True,
            "model_type": "t5",
            "n_positions": 512,
            "num_decoder_layers": 2,
            "output_past": True,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "transformers_version": "4.23.1",
            **OLD_BUCKETS,
        },
    ),
    "t5-v1_1, activation in halves": (
        "t5_v1_1",
        {
            "model_type": "t5",
            "dense_act_fn": "gelu_new",
            "is_gated_act": True,
            "tie_word_embeddings": False,
            "num_decoder_layers": None,
            "pad_token_id": 0,
            "eos_token_id": [1],
            **OLD_BUCKETS,
        },
    ),
    "codet5": (
        "t5",
        {
            "architectures": ["T5ForConditionalGeneration"],
            "bos_token_id": 1,
            "decoder_start_token_id": 0,
            "eos_token_id": 2,
            "feed_forward_proj": "relu",
            "gradient_checkpointing": False,
            "id2label": {"0": "LABEL_0"},
            "is_encoder_decoder": True,
            "model_type": "t5",
            "n_positions": 512,
            "num_decoder_layers": 2,
            "pad_token_id": 0,
            "torch_dtype": "float32",
        },
    ),
}


def published(name: str, folder: Path) -> Path:
    family, config = PUBLISHED[name]
    shutil.copytree(GOLDEN / family, folder)
    (folder / "config.json").write_text(json.dumps({**SIZES, **config}))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_give_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    model = load(published(name, tmp_path / "model"))
    expected = load_file(GOLDEN / PUBLISHED[name][0] / "expected.safetensors")
    ids, mask, labels = (expected[key] for key in ("input_ids", "attention_mask", "labels"))
    assert (model.logits(ids, model.shift_right(labels), mask) - expected["logits"]).abs().max() < 1e-4
    assert model.config.eos_token_id == (2 if name == "codet5" else 1)


def test_a_head_that_is_no_word_is_refused(tmp_path: Path) -> None:
    folder = published("flan-t5", tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "head": ["token"]}))
    with pytest.raises(UserError, match="head"):
        read_config(folder)


def test_an_activation_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = published("flan-t5", tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "feed_forward_proj": None, "dense_act_fn": "tanh"}))
    with pytest.raises(UserError, match=r"feed_forward_proj = gated-tanh, is not known; allowed: relu, gated-gelu"):
        read_config(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_the_stored_dtype_is_that_of_the_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = published("flan-t5", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, folder / "model.safetensors")
    assert stored_dtype(folder) == dtype
    loaded = load(folder, dtype=dtype)
    assert torch.equal(loaded.embedding, weights["shared.weight"].to(dtype))
    assert loaded.decoder.final_norm.weight.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name, shards, dtype",
    [
        ("flan", True, torch.float32),
        ("flan", False, torch.bfloat16),
        ("codet5", False, torch.float32),
        ("codet5", True, torch.float16),
        ("umt5", True, torch.bfloat16),
        ("mt5", True, torch.float32),
    ],
)
def test_folders_that_transformers_writes(name: str, shards: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.golden import make_golden

    family = {"flan": "t5_v1_1", "codet5": "t5"}.get(name, name)
    peer = make_golden.build(family, seed=77).to(dtype)
    peer.config.eos_token_id = 2 if name == "codet5" else 1
    peer.generation_config.eos_token_id = peer.config.eos_token_id
    peer.save_pretrained(tmp_path, max_shard_size="30KB" if shards else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not shards
    peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    batch = make_golden.inputs(peer.config.vocab_size, 77)
    ours = load(tmp_path)
    assert ours.config.eos_token_id == peer.config.eos_token_id
    logits = ours.logits(batch["input_ids"], ours.shift_right(batch["labels"]), batch["attention_mask"])
    assert (logits - peer(**batch).logits).abs().max() < 1e-4


@pytest.mark.slow
def test_memory_of_loading_shards_and_pickles(tmp_path: Path) -> None:
    """Peak: the model and a piece of one tensor, however the files are cut."""
    shape = T5ModelConfig(vocab_size=16000, num_layers=2, num_decoder_layers=2)
    figures = in_child(f"""
import json
from pathlib import Path
from config import T5ModelConfig
from model.hf_format import load, save
from model.t5 import T5
from safetensors.torch import load_file, save_file

place = Path("{tmp_path}")
small = T5(T5ModelConfig(vocab_size=64, d_model=16, num_layers=1, num_decoder_layers=1)).initialise(0)
save(small, place / "small")
torch.save(load_file(place / "small/model.safetensors"), place / "small.bin")
load(place / "small")
torch.load(place / "small.bin", weights_only=True, mmap=True)
model = T5(T5ModelConfig(vocab_size={shape.vocab_size}, num_layers=2, num_decoder_layers=2)).initialise(0)
size = sum(weight.nbytes for weight in model.parameters())
save(model, place / "shards")
save(model, place / "pickle")
tensors = load_file(place / "shards/model.safetensors")
files = {{name: f"model-{{number % 4 + 1:05}}-of-00004.safetensors" for number, name in enumerate(tensors)}}
for file in set(files.values()):
    save_file({{name: tensors[name] for name in tensors if files[name] == file}}, place / "shards" / file)
(place / "shards/model.safetensors.index.json").write_text(json.dumps({{"metadata": {{}}, "weight_map": files}}))
(place / "shards/model.safetensors").unlink()
del tensors
torch.save(load_file(place / "pickle/model.safetensors"), place / "pickle/pytorch_model.bin")
(place / "pickle/model.safetensors").unlink()
del model
shards = measure(lambda: load(place / "shards"))
print(size, shards, measure(lambda: load(place / "pickle", allow_pickle=True)))
""")
    size, *peaks = figures
    # some of it comes from memory that was freed before
    assert all(peak < size + 2**23 for peak in peaks)
