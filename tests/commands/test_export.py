"""Models in other programs' formats: what llama.cpp's reader finds, and what CTranslate2 computes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.check import check
from commands.export import export
from data.text.templates import Template
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from model import hf_format
from model.decoding.generation import generate
from model.formats.sentence_transformers import TextSettings, write_text_settings
from model.rows import Rows
from model.t5 import T5
from serving.model import Model
from settings.errors import UserError
from tests.commands.llama_graph import LlamaT5
from tests.commands.llama_library import LlamaModel
from tests.commands.small import flags_of
from tests.commands.small_exports import SHAPES, TEXTS, WIDE, export_with_named_budget, saved, settings
from tests.training.setup.test_adapters import make_adapter

ENCODERS: dict[str, dict[str, Any]] = {
    family: {"num_decoder_layers": 0, "head": "none"}
    | {name: value for name, value in fields.items() if name in ("feed_forward_proj", "bias_in_every_layer")}
    for family, fields in SHAPES.items()
}
PROMPT = [*range(3, 40), 1]
ANSWER = [0, 9, 200, 31]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: train_tokenizer(TEXTS, kind, 700, 2**20) for kind in ("bpe", "unigram")}


def logits(model: T5, answer: list[int]) -> torch.Tensor:
    """(T, V) of an answer to `PROMPT`."""
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    return model.logits(torch.tensor([PROMPT]), torch.tensor([answer]), mask)[0].detach()


def states(model: T5) -> torch.Tensor:
    """(S, D) of an encoder's `PROMPT`."""
    return model.encode(torch.tensor(PROMPT), Rows((len(PROMPT),))).detach()


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

    assert told("general.architecture") == "t5" and told("t5.block_count") == 3 and told("t5.decoder_block_count") == 2
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
    there = LlamaT5(gguf.GGUFReader(str(tmp_path / "out" / "model-f32.gguf"))).logits(PROMPT, ANSWER)
    here = logits(model, ANSWER)
    assert torch.allclose(there, here, atol=1e-5 * float(here.abs().max()))


def test_what_llama_cpp_would_compute_otherwise_is_refused(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    fields = {"feed_forward_proj": "gated-silu", "relative_attention_max_distance": 64, "num_decoder_layers": 4}
    source, _ = saved(tmp_path / "model", tokenizers["bpe"], **fields)
    with pytest.raises(UserError) as refused:
        export(settings(source, tmp_path / "out", "gguf"))
    assert len(refused.value.problems) == 3 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("quantize", "name", "tolerance"), [("int8", "q8_0", 0.02), ("q4", "q4_0", 0.4)])
@pytest.mark.parametrize("family", SHAPES)
def test_quantized_files_compute_nearly_the_same(
    family: str, quantize: str, name: str, tolerance: float, tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    source, model = saved(tmp_path / "model", tokenizers["bpe"], d_ff=72, **SHAPES[family])
    export(settings(source, tmp_path / "out", "gguf", quantize=quantize))
    reader = gguf.GGUFReader(str(tmp_path / "out" / f"model-{name}.gguf"))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["enc.blk.0.attn_q.weight"] == name.upper() and types["token_embd.weight"] == "Q8_0"
    assert types["enc.blk.0.ffn_down.weight"] == "F16", "its rows of 72 numbers are no whole blocks"
    assert types["enc.output_norm.weight"] == types["enc.blk.0.attn_rel_b.weight"] == "F32"
    there = LlamaT5(reader).logits(PROMPT, ANSWER)
    here = logits(model, ANSWER)
    assert (there - here).norm() < tolerance * here.norm()


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_an_encoder_gives_llama_cpp_its_states(family: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    source, model = saved(tmp_path / "model", tokenizers["bpe"], **ENCODERS[family])
    export(settings(source, tmp_path / "out", "gguf"))
    reader = gguf.GGUFReader(str(tmp_path / "out" / "model-f32.gguf"))
    assert reader.fields["general.architecture"].contents() == "t5encoder"
    assert reader.fields["t5encoder.pooling_type"].contents() == gguf.PoolingType.MEAN
    there = LlamaT5(reader).encode(PROMPT)
    here = states(model)
    assert torch.allclose(there, here, atol=1e-5 * float(here.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("family", SHAPES)
def test_llama_cpp_itself_computes_the_same(family: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    """Its products on a CPU round keys, values and GELU to fp16."""
    pytest.importorskip("gguf")
    for kind, tokenizer in tokenizers.items():
        source, model = saved(tmp_path / f"model-{kind}", tokenizer, **SHAPES[family])
        export(settings(source, tmp_path / f"out-{kind}", "gguf"))
        there = LlamaModel(tmp_path / f"out-{kind}" / "model-f32.gguf")
        answer = [model.config.start_token_id, *ANSWER[1:]]
        here = logits(model, answer)
        assert torch.allclose(torch.tensor(there.logits(PROMPT, answer)), here, atol=2e-3 * float(here.abs().max()))
        for text in TEXTS[:5]:
            assert there.ids(text) == [*tokenizer.encode_prompts([text])[0].tolist(), tokenizer.eos_id]
    source, model = saved(tmp_path / "encoder", tokenizers["bpe"], **ENCODERS[family])
    export(settings(source, tmp_path / "out", "gguf"))
    pooled = states(model).mean(0)
    there = LlamaModel(tmp_path / "out" / "model-f32.gguf")
    assert torch.allclose(torch.tensor(there.pooled(PROMPT)), pooled, atol=2e-3 * float(pooled.abs().max()))


@pytest.mark.parametrize("form", ["gguf", "ctranslate2"])
def test_heads_over_labels_are_for_onnx(form: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip(form)
    fields = {**ENCODERS["t5"], "head": "sequence", "labels": "few,many"}
    source, _ = saved(tmp_path / "model", tokenizers["bpe"], **fields)
    with pytest.raises(UserError, match=r"--head=sequence.*use --format=onnx"):
        export(settings(source, tmp_path / "out", form))


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("form", ["gguf", "ctranslate2"])
def test_vectors_without_a_matrix_are_pooled_there(
    form: str, pooling: str, tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    pytest.importorskip(form)
    fields = {**ENCODERS["t5"], "head": "embedding", "pooling": pooling}
    source, _ = saved(tmp_path / "model", tokenizers["bpe"], **fields)
    difference = export(settings(source, tmp_path / "out", form))
    card = (tmp_path / "out" / "README.md").read_text()
    if form == "gguf":
        import gguf

        reader = gguf.GGUFReader(str(tmp_path / "out" / "model-f32.gguf"))
        names = {"mean": "MEAN", "first": "CLS", "last": "LAST"}
        assert reader.fields["t5encoder.pooling_type"].contents() == gguf.PoolingType[names[pooling]]
        assert "llama-embedding" in card
    else:
        assert difference is not None and difference < 1e-5
        (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        words = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "out", capture_output=True, text=True)
        (expected,) = Model(source, mixed_precision="no").embed(["Your question"])
        numbers = torch.tensor([float(word) for word in words.stdout.strip("[]\n ").split()])
        assert torch.allclose(numbers, torch.tensor(expected), atol=1e-5), words.stderr


@pytest.mark.parametrize("form", ["gguf", "ctranslate2"])
def test_a_matrix_before_vectors_is_for_onnx(form: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip(form)
    fields = {**ENCODERS["t5"], "head": "embedding", "embedding_size": 8}
    source, _ = saved(tmp_path / "model", tokenizers["bpe"], **fields)
    with pytest.raises(UserError, match=r"--embedding_size=8.*use --format=onnx"):
        export(settings(source, tmp_path / "out", form))


def test_two_precisions_are_refused(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    source, _ = saved(tmp_path / "model", tokenizers["bpe"])
    with pytest.raises(UserError, match="--quantize = int8, contradicts --dtype = fp16"):
        export(settings(source, tmp_path / "out", "gguf", quantize="int8", dtype="fp16"))
    export(settings(source, tmp_path / "out", "gguf", quantize="fp16", dtype="fp16"))
    assert (tmp_path / "out" / "model-f16.gguf").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "tolerance"), [("none", 1e-5), ("fp16", 1e-3), ("int8", 5e-2)])
@pytest.mark.parametrize("family", SHAPES)
def test_ctranslate2_runs_encoders_and_quantized_weights(
    family: str, quantize: str, tolerance: float, tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2")
    for number, fields in enumerate((ENCODERS[family], SHAPES[family])):
        source, _ = saved(tmp_path / f"model-{number}", tokenizers["bpe"], **fields)
        difference = export(settings(source, tmp_path / f"out-{number}", "ctranslate2", quantize=quantize))
        assert difference is not None and difference < tolerance


@pytest.mark.slow
def test_ctranslate2_has_no_4_bits(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    source, _ = saved(tmp_path / "model", tokenizers["bpe"])
    with pytest.raises(UserError, match="allowed: none, fp16, int8"):
        export(settings(source, tmp_path / "out", "ctranslate2", quantize="q4"))


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


FOR_CTRANSLATE2 = [
    pytest.param("ctranslate2", precision, marks=pytest.mark.slow) for precision in ("none", "fp16", "int8")
]


@pytest.mark.parametrize(("form", "quantize"), [("gguf", "none"), ("gguf", "fp16"), ("gguf", "int8"), *FOR_CTRANSLATE2])
def test_the_budget_that_a_refusal_names_is_enough(
    form: str, quantize: str, tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    pytest.importorskip(form)
    source, _ = saved(tmp_path / "model", tokenizers["bpe"], **WIDE)
    export_with_named_budget(model=source, output=tmp_path / "out", format=form, quantize=quantize)


def test_numbers_that_fp16_cannot_hold_are_refused_by_the_flag_that_was_typed(
    tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    source, model = saved(tmp_path / "model", tokenizers["bpe"])
    model.embedding.data[0, 0] = 1e5
    hf_format.save(model, source)
    for flag in ("quantize", "dtype"):
        with pytest.raises(UserError, match=f"--{flag} = fp16, cannot hold the 1.0e\\+05"):
            export(settings(source, tmp_path / "out", "gguf", **{flag: "fp16"}))


def test_a_greedy_model_is_greedy_in_llama_cpp_too(
    tokenizers: dict[str, Tokenizer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    source, _ = saved(tmp_path / "model", tokenizers["bpe"])
    (source / "generation_config.json").write_text('{"max_new_tokens": 12}')
    Template.load("Q: {prompt}\nA:", "it's: ").save(source)
    export(settings(source, tmp_path / "out", "gguf"))
    card = (tmp_path / "out" / "README.md").read_text()
    (command,) = re.findall(r"```\n(llama-completion .*?)\n```", card, re.DOTALL)
    text = "it's: Q: Your text\nA:"
    assert shlex.split(command)[3:] == ["-p", text, "--temp", "0.0", "-n", "12"]
    output = " ".join(capsys.readouterr().out.split())
    assert "llama-completion -m" in output and "--temp 0.0 -n 12" in output
    assert '"it\'s: Q: " before them' in output


@pytest.mark.slow
def test_the_card_of_ctranslate2_gives_the_models_own_answer(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    tokenizer = tokenizers["bpe"]
    source, model = saved(tmp_path / "model", tokenizer)
    (source / "generation_config.json").write_text('{"max_new_tokens": 12}')
    Template.load("Q: {prompt} A:").save(source)
    export(settings(source, tmp_path / "out", "ctranslate2"))
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    code = code.replace('compute_type="int8"', 'compute_type="float32"')
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "out", capture_output=True, text=True)
    (prompt,) = tokenizer.encode_prompts(["Q: Your text A:"])
    (answer,) = generate(model, [[*prompt.tolist(), tokenizer.eos_id]], max_new_tokens=12)
    assert done.stdout.rstrip("\n") == tokenizer.decode(answer).rstrip("\n"), done.stderr


@pytest.mark.parametrize(("how", "prepared"), [("prott5", "'M K X'"), ("ankh", "['M', 'K', 'U']")])
def test_texts_that_are_prepared_here_alone_are_shown(
    how: str, prepared: str, tokenizers: dict[str, Tokenizer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    source, _ = saved(tmp_path / "model", tokenizers["bpe"], **ENCODERS["t5"])
    (source / "settings.json").write_text(json.dumps({"prepare_text": how}))
    export(settings(source, tmp_path / "out", "gguf"))
    assert f"give {prepared} in place of 'MKU'" in " ".join(capsys.readouterr().out.split())
    assert f"give `{prepared}` in place of `'MKU'`" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("place", ["checkpoint", "sentence-transformers"])
def test_a_card_has_the_prompts_wherever_they_are_published(
    place: str, tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    source = tmp_path / "run" / "checkpoints" / "step_00000001"
    source.mkdir(parents=True)
    saved(source, tokenizers["bpe"], **{**ENCODERS["t5"], "head": "embedding"})
    if place == "checkpoint":
        (tmp_path / "run" / "settings.json").write_text('{"query_prompt": "ask: "}')
    else:
        write_text_settings(source, TextSettings(query_prompt="ask: "))
    export(settings(source, tmp_path / "out", "gguf"))
    assert "-p 'ask: Your question'" in (tmp_path / "out" / "README.md").read_text()


def test_the_card_of_an_adapter_knows_the_head_of_its_base(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    source, _ = saved(tmp_path / "model", tokenizers["bpe"], **ENCODERS["t5"])
    adapter = make_adapter(source, tmp_path / "adapter", 1)
    export(settings(source, tmp_path / "out", "gguf", adapter=str(adapter)))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: feature-extraction" in card and "llama-embedding" in card


def test_a_card_with_its_owners_words_stays(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    """It is no damage either; a card of ours is written anew."""
    pytest.importorskip("gguf")
    source, _ = saved(tmp_path / "model", tokenizers["bpe"])
    card = tmp_path / "out" / "README.md"
    export(settings(source, tmp_path / "out", "gguf"))
    written = card.read_text()
    card.write_text(written + "mine")
    assert check(flags_of("check", model=tmp_path / "out"))
    export(settings(source, tmp_path / "out", "gguf", overwrite="True"))
    assert card.read_text() == written
    card.write_text("mine")
    export(settings(source, tmp_path / "out", "gguf", overwrite="True"))
    assert card.read_text() == "mine"
    assert check(flags_of("check", model=tmp_path / "out"))
