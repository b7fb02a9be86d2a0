"""Models in other programs' formats: what llama.cpp's reader finds, and what CTranslate2 and ONNX Runtime compute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.export import export
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from model import hf_format
from model.decoding.generation import generate
from model.t5 import T5
from settings.declared import Config, T5ModelConfig
from settings.errors import UserError
from settings.loading import load
from tests.commands.llama_graph import LlamaT5

TEXTS = [f"a river runs under a bridge {number}, and it's 3 o'clock; 中文" for number in range(100)]
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5_v1_1": {**GATED, "scale_decoder_outputs": False},
    "umt5": {**GATED, "bias_in_every_layer": True},
    "madlad": {**GATED, "scale_decoder_outputs": False, "decoder_start_token_id": 3},
}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: train_tokenizer(TEXTS, kind, 700, 2**20) for kind in ("bpe", "unigram")}


def saved(folder: Path, tokenizer: Tokenizer, **fields: Any) -> tuple[Path, T5]:
    """A small model that looks at distances and at its source, and a tokenizer beside it."""
    shape = T5ModelConfig(
        vocab_size=tokenizer.size + 8,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_heads=2,
        num_layers=2,
        num_decoder_layers=3,
        **fields,
    )
    model = T5(shape).initialise(3)
    for name, weight in model.named_parameters():
        if name.endswith("bias.table"):
            weight.data.normal_(generator=torch.Generator().manual_seed(1))
        if name.endswith(("0.feed_forward.wo.weight", "1.attention.o.weight")):
            weight.data.mul_(4.0)
    hf_format.save(model, folder)
    tokenizer.save(folder)
    return folder, hf_format.load(folder)


def settings(source: Path, output: Path, form: str, **flags: str) -> Config:
    return load("export", {"model": str(source), "output": str(output), "format": form, **flags})


@pytest.mark.parametrize(("family", "kind"), [("t5", "bpe"), ("umt5", "unigram")])
def test_llama_cpp_finds_all_it_looks_for(
    family: str, kind: str, tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    from gguf.constants import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES

    tokenizer = tokenizers[kind]
    source, model = saved(tmp_path / "model", tokenizer, **SHAPES[family])
    assert export(settings(source, tmp_path / "out", "gguf")) is None
    reader = gguf.GGUFReader(str(tmp_path / "out" / "model-f32.gguf"))
    expected = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[MODEL_ARCH.T5]}
    patterns = {re.sub(r"blk\.\d+", "blk.{bid}", tensor.name).removesuffix(".weight") for tensor in reader.tensors}
    optional = {"dec.blk.{bid}.cross_attn_rel_b"} | ({"output"} if family == "t5" else set())
    optional |= {"enc.blk.{bid}.ffn_gate", "dec.blk.{bid}.ffn_gate"} if family == "t5" else set()
    assert patterns == expected - optional

    def told(name: str) -> Any:
        return reader.fields[name].contents()

    assert told("general.architecture") == "t5" and told("t5.block_count") == 2 and told("t5.decoder_block_count") == 3
    assert told("t5.decoder_start_token_id") == told("tokenizer.ggml.bos_token_id") == model.config.start_token_id
    assert told("tokenizer.ggml.padding_token_id") == tokenizer.pad_id
    assert told("tokenizer.ggml.model") == {"bpe": "gpt2", "unigram": "t5"}[kind]
    pieces, kinds = told("tokenizer.ggml.tokens"), told("tokenizer.ggml.token_type")
    assert len(pieces) == model.config.vocab_size and kinds[tokenizer.eos_id] == gguf.TokenType.CONTROL
    assert {kinds[number] for number in tokenizer.sentinel_ids} == {gguf.TokenType.USER_DEFINED}


@pytest.mark.parametrize("family", SHAPES)
def test_llama_cpps_graph_gives_the_same_logits(family: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    source, model = saved(tmp_path / "model", tokenizers["bpe"], **SHAPES[family])
    export(settings(source, tmp_path / "out", "gguf"))
    prompt = [*range(3, 40), 1]
    answer = [0, 9, 200, 31]
    there = LlamaT5(gguf.GGUFReader(str(tmp_path / "out" / "model-f32.gguf"))).logits(prompt, answer)
    here = model.logits(torch.tensor([prompt]), torch.tensor([answer]), torch.ones(1, len(prompt), dtype=torch.long))[0]
    assert torch.allclose(there, here.detach(), atol=1e-5 * float(here.abs().max()))


def test_what_llama_cpp_would_compute_otherwise_is_refused(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    fields = {"feed_forward_proj": "gated-silu", "relative_attention_max_distance": 64}
    source, _ = saved(tmp_path / "model", tokenizers["bpe"], **fields)
    with pytest.raises(UserError) as refused:
        export(settings(source, tmp_path / "out", "gguf"))
    assert len(refused.value.problems) == 2 and not (tmp_path / "out").exists()


@pytest.mark.slow  # importing ctranslate2 imports transformers
@pytest.mark.parametrize("family", SHAPES)
def test_ctranslate2_gives_the_same_answers(family: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    tokenizer = tokenizers["bpe"]
    source, model = saved(tmp_path / "model", tokenizer, **SHAPES[family])
    difference = export(settings(source, tmp_path / "out", "ctranslate2"))
    assert difference is not None and difference < 1e-5
    translator = ctranslate2.Translator(str(tmp_path / "out"), device="cpu", intra_threads=1, compute_type="float32")
    rows = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_batch(["a river", "runs under a bridge"])]
    names = [tokenizer.id_to_token(number) for number in range(tokenizer.size)]
    prompts = [[names[number] for number in row] for row in rows]  # with </s>, as transformers' tokenizers give it
    answers = [
        result.hypotheses[0] for result in translator.translate_batch(prompts, beam_size=1, max_decoding_length=12)
    ]
    assert answers == [
        [names[number] if number < tokenizer.size else f"[PAD{number}]" for number in answer]
        for answer in generate(model, rows, max_new_tokens=12)
    ]


@pytest.mark.parametrize(("family", "dtype"), [("t5", "fp16"), ("t5_v1_1", "keep"), ("umt5", "keep")])
def test_onnx_gives_the_same_logits(family: str, dtype: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    source, _ = saved(tmp_path / "model", tokenizers["unigram"], **SHAPES[family])
    difference = export(settings(source, tmp_path / "out", "onnx", dtype=dtype))
    assert difference is not None and difference < 1e-5


def test_the_code_of_a_card_runs_as_it_is(
    tokenizers: dict[str, Tokenizer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    tokenizer = tokenizers["bpe"]
    source, model = saved(tmp_path / "model", tokenizer)
    export(settings(source, tmp_path / "out", "onnx"))
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    capsys.readouterr()
    exec(code, {})
    (prompt,) = tokenizer.encode_prompts(["Your text"])
    (answer,) = generate(model, [[*prompt, tokenizer.eos_id]], max_new_tokens=63)
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(answer).rstrip("\n")
