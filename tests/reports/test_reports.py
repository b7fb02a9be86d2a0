"""Public reports about other programs, tried on this one: where each comes from, what breaks there, and what is right.

`REPORTS` and `SLOW` are the table. Each row names a repository and a number, an issue unless it says PR, then what
breaks there, and after the dash what is right here. Its input is made here: tiny random models as transformers saves
them, adapters as PEFT saves them, files of a few rows. What is right comes from the program that defines the format
(transformers, PEFT, datasets, pyarrow, gguf, onnxruntime, the csv module), or from what the file itself says; where it
can only be refused, the refusal names what is wrong.
"""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from commands.export import export
from commands.merge import merge
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer, train_tokenizer
from model import hf_format
from settings.errors import UserError
from settings.loading import load

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).resolve().parents[2]
Check = Callable[[Path], None]
Tensors = dict[str, Tensor]
Rows = list[tuple[str, str]]
PAIRS: Rows = [("a", "b"), ("c", "d")]
IDS = torch.tensor([[5, 9, 33, 7, 1]])
LABELS = torch.tensor([[8, 12, 4, 1]])
SIZE = 384  # ids of the tokenizer of bytes


# --- models, as transformers saves them


def library() -> Any:
    """transformers, which nothing here fetches from."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def save_model(folder: Path, kind: str = "T5ForConditionalGeneration", seed: int = 0, **fields: Any) -> Any:
    """A model of random weights, large enough that its answers differ, in a folder with a tokenizer."""
    family = kind.partition("5")[0] + "5Config"
    shape = {
        "vocab_size": SIZE,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    torch.manual_seed(seed)
    model = getattr(library(), kind)(getattr(library(), family)(**{**shape, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if model.config.vocab_size == SIZE:
        byte_tokenizer().save(folder)
    return model


def spelling() -> Tokenizer:
    """A byte-level BPE, with as many ids as the base has rows."""
    return train_tokenizer(["a river runs under a bridge"] * 50, "bpe", SIZE, 2**20)


@functools.cache
def base() -> Path:
    """The folder that most rows begin with."""
    folder = Path(tempfile.mkdtemp(prefix="reports-")) / "base"
    save_model(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def base_as_long_as_the_table() -> Iterator[None]:
    yield
    if base.cache_info().currsize:
        shutil.rmtree(base().parent)


def spoilt(folder: Path, change: Callable[[Tensors], Tensors] = dict, **fields: Any) -> Path:
    """A copy of the base with other tensors and other words in its configuration."""
    shutil.copytree(base(), folder)
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(base() / "model.safetensors")).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def theirs(model: Any) -> Tensor:
    """The logits that transformers computes, of a model or of the model in a folder."""
    if isinstance(model, Path):
        model = library().AutoModelForSeq2SeqLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(input_ids=IDS, labels=LABELS).logits


def ours(folder: Path) -> Tensor:
    """The same from the model that is read here."""
    model = hf_format.load(folder)
    with torch.no_grad():
        return model.logits(IDS, torch.cat([torch.zeros_like(LABELS[:, :1]), LABELS[:, :-1]], 1))


def same(ours: Tensor, right: Tensor, far: float = 1e-4) -> None:
    torch.testing.assert_close(ours.flatten(), right.flatten(), rtol=0, atol=far)


def named(prefix: str) -> Check:
    """Tensors under names that a wrapper has lengthened are those of the model that it wraps."""

    def check(folder: Path) -> None:
        change = {name: prefix.replace("*", name) for name in load_file(base() / "model.safetensors")}
        same(ours(spoilt(folder / "m", lambda t: {change[name]: tensor for name, tensor in t.items()})), theirs(base()))

    return check


def indexed(folder: Path, tensors: Tensors) -> None:
    """Two shards and their index."""
    names = sorted(tensors)
    shards = {name: f"model-0000{1 + (number % 2)}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(shards.values()):
        save_file({name: tensors[name] for name in names if shards[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def beside_an_old_index(folder: Path) -> None:
    save_model(folder / "old", seed=9)
    mixed = spoilt(folder / "m")
    indexed(mixed, load_file(folder / "old" / "model.safetensors"))
    same(ours(mixed), theirs(mixed))
    same(ours(mixed), theirs(base()))


def narrow_weights(folder: Path) -> None:
    mixed = spoilt(folder / "m", lambda t: {n: v.to(torch.float8_e4m3fn) if v.dim() == 2 else v for n, v in t.items()})
    same(ours(mixed), theirs(mixed), 1e-3)


def without_a_head(folder: Path) -> None:
    for kind in ("UMT5Model", "T5Model"):
        save_model(folder / kind, kind)
        path = folder / kind / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": False}))
        with pytest.raises(UserError, match=r"lacks 1 tensor of the model \(lm_head\.weight\)"):
            hf_format.load(folder / kind)


def in_the_hub_cache(folder: Path) -> None:
    blobs = folder / "models--a--b" / "blobs"
    snapshot = folder / "models--a--b" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["a", "c"], "response": ["b", "d"]}), folder / "train.parquet")
    for number, path in enumerate([*base().iterdir(), folder / "train.parquet"]):
        shutil.copy(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    same(ours(snapshot), theirs(base()))
    assert rows_of(snapshot / "train.parquet") == PAIRS


# --- adapters, as PEFT saves them


def adapted(folder: Path, change: Callable[[Tensors], Tensors] = dict, form: Any = None, **facts: Any) -> Tensor:
    """Save an adapter of q and v that has learnt, with other tensors and other words; returns PEFT's logits with it."""
    import peft

    model = library().AutoModelForSeq2SeqLM.from_pretrained(base())
    form = {"r": 4, "lora_alpha": 16, "task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "v"], **(form or {})}
    model = peft.get_peft_model(model, peft.LoraConfig(**form)).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.peft_config["default"].base_model_name_or_path = str(base())
    model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    file = folder / "adapter_model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    save_file({name: tensor.clone() for name, tensor in change(load_file(file)).items()}, file)
    return theirs(model)


def merged(folder: Path) -> Path:
    output = folder.with_name("merged")
    merge(load("merge", {"adapter": str(folder), "model": str(base()), "output": str(output)}))
    return output


def merges(form: Any = None, **facts: Any) -> Check:
    """An adapter gives the logits that it has in PEFT."""

    def check(folder: Path) -> None:
        right = adapted(folder / "adapter", form=form, **facts)
        same(theirs(merged(folder / "adapter")), right)

    return check


def unmergeable(words: str, change: Callable[[Tensors], Tensors]) -> Check:
    """An adapter that is refused in these words."""

    def check(folder: Path) -> None:
        adapted(folder / "adapter", change)
        with pytest.raises(UserError, match=words):
            merged(folder / "adapter")

    return check


# --- exports


def exported(model: Path, form: str, **flags: str) -> Path:
    output = model.with_name(f"{model.name}-{form}")
    export(load("export", {"model": str(model), "output": str(output), "format": form, **flags}))
    return output


def too_large_for_fp16(folder: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        tensors["encoder.block.0.layer.1.DenseReluDense.wo.weight"][0, 0] = 1e5
        return tensors

    model = spoilt(folder / "m", change)
    spelling().save(model)
    for form in ("gguf", "ctranslate2", "onnx"):
        with pytest.raises(UserError, match=r"--dtype = fp16, cannot hold the 1\.0e\+05 in encoder\.blocks\.0"):
            exported(model, form, dtype="fp16")


def merges_in_pairs(folder: Path) -> None:
    from gguf import GGUFReader

    spelling().save(folder / "m")
    path = folder / "m" / "tokenizer.json"
    written = json.loads(path.read_text())
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in written["model"]["merges"]]
    written["model"]["merges"] = pairs
    save_model(folder / "m", vocab_size=512)
    path.write_text(json.dumps(written))
    (file,) = exported(folder / "m", "gguf").glob("*.gguf")
    assert GGUFReader(file).fields["tokenizer.ggml.merges"].contents() == [" ".join(pair) for pair in pairs]


# --- data


def rows_of(spec: object) -> list[tuple[str, ...]]:
    """The rows of files."""
    return [row for batch in read_rows(find(str(spec)), ["prompt", "response"], BadRows(False)) for row in batch]


def lines(rows: Rows) -> bytes:
    return "".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in rows).encode()


def reads(files: dict[str, bytes], spec: str = "", right: list[tuple[str, ...]] = PAIRS) -> Check:
    """These files give these rows."""

    def check(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        assert rows_of(folder / spec) == right

    return check


def packed(pack: Callable[[bytes], bytes]) -> bytes:
    """Two parts, each packed alone, end to end."""
    return b"".join(pack(lines([pair])) for pair in PAIRS)


def zstd(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))


def saved_without_rows(folder: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_dict({"prompt": ["a", "c"], "response": ["b", "d"]})
    datasets.DatasetDict(train=whole, test=whole.select([])).save_to_disk(folder / "saved")
    assert rows_of(folder / "saved") == PAIRS
    with pytest.raises(UserError, match=r"test, is a saved dataset without rows"):
        find(str(folder / "saved"), "--validation_file")


# --- training, evaluation, answers


def launched_otherwise(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines(PAIRS))
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "train", "--is_finetune=True", "--train_file=a.jsonl"]
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"):
        done = subprocess.run(
            [*command, f"--finetune_from={base()}"],
            cwd=folder,
            env={**os.environ, name: "true"},
            capture_output=True,
            text=True,
        )
        screen = done.stdout + done.stderr
        assert done.returncode == 2 and f"{name} = true, is another engine's" in screen and "Traceback" not in screen


# --- the table


def missing_blocks(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "decoder.block.1" not in name}


FRAMES = {
    "0.jsonl.zst": packed(zstd),
    "1.jsonl.gz": packed(gzip.compress),
    "2.jsonl.xz": packed(lzma.compress),
}
LATER_TABLE = {
    "0.jsonl": b'{"prompt": "a", "response": "b", "t": []}\n',
    "1.jsonl": b'{"prompt": "c", "response": "d", "t": [{"i": 1}]}',
}
# These import transformers or PEFT, or start runs.
SLOW: dict[str, Check] = {
    "AlmondGod/tinyworlds PR 13: compiled under DDP - the model within": named("_orig_mod.module.*"),
    "Blaizzy/mlx-vlm PR 638: the source's index beside converted weights - one file first": beside_an_old_index,
    "huggingface/diffusers PR 10604: fp8 matrices beside fp32 norms - widened": narrow_weights,
    "ggml-org/llama.cpp PR 17159: google/umt5-xl is a UMT5Model, without a head - refused": without_a_head,
    "robertknight/rten 1334: the hub's cache links to blobs without an ending - read": in_the_hub_cache,
    "oobabooga/textgen 6819: settings of a newer PEFT, all null, stop the loading - merged as by PEFT": merges(
        trainable_token_indices=None, a_newer_setting=None, lora_bias=False
    ),
    "huggingface/peft 2566: tensors of target modules are missing, and only warned of - refused": unmergeable(
        r"lacks 4 tensors of the modules .*decoder\.block\.1", missing_blocks
    ),
    "huggingface/peft 2165: adapters on some blocks of encoder and decoder - merged as by PEFT": merges(
        form={"layers_to_transform": [1], "layers_pattern": "block"}
    ),
    "ggml-org/llama.cpp 13722: numbers beyond fp16 become inf in a GGUF - refused": too_large_for_fp16,
    "ggml-org/llama.cpp 9692: merges in pairs, as tokenizers 0.20 writes them, are lost - kept": merges_in_pairs,
    "huggingface/trl PR 3351: launched by a configuration for DeepSpeed - refused": launched_otherwise,
}
REPORTS: dict[str, Check] = {
    "huggingface/datasets PR 8397: one empty shard stops all others - read": reads(
        {"00.jsonl": b"", "01.jsonl": lines(PAIRS), "02.csv": b""}
    ),
    "huggingface/datasets PR 8385: a split without rows is saved without a shard - refused": saved_without_rows,
    "facebook/zstd 4569: several frames in one file - all of them": reads(FRAMES, right=PAIRS * 3),
    "huggingface/datasets 7468: brackets in a folder's name are taken for a pattern - its own name": reads(
        {"[D_DATA] 数据, x/d[1].jsonl": lines(PAIRS)}, "[D_DATA] 数据, x"
    ),
    "huggingface/datasets 7092: a column that is [] at first and a table later - each row's own JSON": reads(
        LATER_TABLE
    ),
}


@pytest.mark.parametrize(
    "check",
    [
        *(pytest.param(check, id=source) for source, check in REPORTS.items()),
        *(pytest.param(check, id=source, marks=pytest.mark.slow) for source, check in SLOW.items()),
    ],
)
def test_report(check: Check, tmp_path: Path) -> None:
    check(tmp_path)
