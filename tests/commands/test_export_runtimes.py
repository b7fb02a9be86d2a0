"""Exports at published widths, run where people run them: onnxruntime, Optimum, transformers.js in Node and in Chromium,
CTranslate2, llama.cpp.

Optimum wants a transformers of its own, transformers.js Node or a browser, llama.cpp a library: environment variables say
where they are (see CONTRIBUTING.md), and what is not there is skipped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.parts.random_models import write_random_model
from commands.convert import fixed_ids, probe_logits
from commands.export import export
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from model import hf_format
from model.decoding.generation import generate
from model.rows import Rows
from model.t5 import T5
from settings.declared import GenerateConfig, T5ModelConfig
from settings.precedence import model_presets
from tests.commands.in_chromium import answers_in_chromium
from tests.commands.llama_library import LlamaModel
from tests.commands.small_exports import TEXTS, saved, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]
HERE = Path(__file__).parent
OPTIMUM = os.environ.get("FRUGALT5_OPTIMUM_PYTHON", "")
MODULES = os.environ.get("FRUGALT5_TRANSFORMERS_JS", "")
PROMPTS, SEARCHED, NEW_TOKENS, BEAMS, TOGETHER = 200, 20, 8, 4, 50
OF_ROUNDED = 190  # llama.cpp rounds keys, values and GELU to fp16, and two tokens may be as likely but for that.
MOST_FILE_BYTES = 2**31
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5-small": ("t5-small", {}),
    "t5-v1.1-small": ("t5-v1.1-small", {}),
    "codet5-small": ("t5-small", {"vocab_size": 32100}),
    "byt5-small": ("byt5-small", {}),
    "mt5-small": ("mt5-small", {}),
    "umt5-small": ("umt5-small", {}),
    "flan-t5-base": ("t5-v1.1-base", {}),
    "madlad400-3b, two layers": (
        "t5-v1.1-3b",
        {
            "vocab_size": 256000,
            "d_model": 1024,
            "d_ff": 8192,
            "d_kv": 128,
            "num_heads": 16,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "pad_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, "bpe", 384, 2**20)  # As many as ByT5 has rows.


def run(words: list[str], path: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Give a job to a program that answers in JSON."""
    path.write_text(json.dumps(job))
    done = subprocess.run([*words, str(path)], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def in_optimum(folder: Path, **job: Any) -> dict[str, Any]:
    if not OPTIMUM:
        pytest.skip("FRUGALT5_OPTIMUM_PYTHON names no Python with optimum-onnx")
    return run([OPTIMUM, str(HERE / "in_optimum.py")], folder.parent / "job.json", {"folder": str(folder), **job})


def in_transformers_js(folder: Path, **job: Any) -> dict[str, Any]:
    if not MODULES or shutil.which("node") is None:
        pytest.skip(
            "FRUGALT5_TRANSFORMERS_JS names no node_modules with @huggingface/transformers, or there is no node"
        )
    words = ["node", str(HERE / "in_transformers_js.mjs"), MODULES]
    return run(words, folder.parent / "job.json", {"folder": str(folder), "dtype": "fp32", **job})


def answer(ids: list[int], shape: T5ModelConfig) -> list[int]:
    """What stands between start and end."""
    tokens = ids[1:]
    return tokens[: tokens.index(shape.eos_token_id)] if shape.eos_token_id in tokens else tokens


@pytest.mark.parametrize(
    "runtime", ["onnxruntime", "optimum", "transformers.js", "chromium", "ctranslate2", "llama.cpp"]
)
@pytest.mark.parametrize("name", PRESETS)
def test_a_published_width_answers_everywhere_as_here(
    name: str, runtime: str, exported: dict[str, Any], tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if exported.get("name") != name:
        if "folder" in exported:
            shutil.rmtree(exported["folder"].parent)
        exported.clear()
        exported.update(name=name, **exported_width(name, tmp_path_factory.mktemp("width"), tokenizer))
    folder, shape, rows, expected = (exported[key] for key in ("folder", "shape", "rows", "answers"))
    if runtime == "onnxruntime":
        found = in_onnxruntime(folder, shape, rows)
    elif runtime == "optimum":
        there = in_optimum(folder, sources=rows, new_tokens=NEW_TOKENS, searched=SEARCHED, beams=BEAMS)
        found = [answer(ids, shape) for ids in there["answers"]]
        assert [answer(ids, shape) for ids in there["searched"]] == exported["searched"]
    elif runtime == "chromium":
        if not MODULES or shutil.which("chromium") is None:
            pytest.skip("FRUGALT5_TRANSFORMERS_JS names no node_modules with @huggingface/transformers, or no chromium")
        if any(path.stat().st_size >= MOST_FILE_BYTES for path in (folder / "onnx").iterdir()):
            pytest.skip("no browser reads a file as large as this decoder's")
        room = tmp_path_factory.mktemp("room")
        found = [answer(ids, shape) for ids in answers_in_chromium(folder, Path(MODULES), room, rows, NEW_TOKENS)]
    elif runtime == "ctranslate2":
        found = in_ctranslate2(folder.parent / "model", shape, rows)
    elif runtime == "llama.cpp":
        found = in_llama_cpp(folder.parent / "model", shape, rows)
    else:
        there = in_transformers_js(folder, sources=rows, new_tokens=NEW_TOKENS)
        found = [answer(ids, shape) for ids in there["answers"]]
    equal = sum(map(list.__eq__, found, expected))
    print(f"{name} in {runtime}: {equal} of {PROMPTS} answers are equal")
    assert equal >= (OF_ROUNDED if runtime == "llama.cpp" else PROMPTS)


@pytest.fixture(scope="module")
def exported() -> dict[str, Any]:
    return {}


def exported_width(name: str, folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """A model of that width with random weights, exported, and its own answers."""
    preset, fields = PRESETS[name]
    shape = dataclasses.replace(T5ModelConfig(**model_presets()[preset]), **fields)
    write_random_model(folder / "model", shape)
    tokenizer.save(folder / "model")
    difference = export(settings(folder / "model", folder / "out", "onnx"))
    assert difference is not None and difference < 1e-5
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(3, shape.vocab_size, (PROMPTS, 5), generator=generator).tolist()
    rows = [[*ids[: 2 + number % 4], shape.eos_token_id] for number, ids in enumerate(words)]
    model = hf_format.load(folder / "model", maps=True)
    answers = [ids for part in batches(rows) for ids in generate(model, part, max_new_tokens=NEW_TOKENS)]
    searched = generate(model, rows[:SEARCHED], max_new_tokens=NEW_TOKENS, num_beams=BEAMS)
    return {"folder": folder / "out", "shape": shape, "rows": rows, "answers": answers, "searched": searched}


def batches(rows: list[list[int]]) -> list[list[list[int]]]:
    return [rows[start : start + TOGETHER] for start in range(0, len(rows), TOGETHER)]


def in_onnxruntime(folder: Path, shape: T5ModelConfig, rows: list[list[int]]) -> list[list[int]]:
    pytest.importorskip("onnxruntime")
    from commands.exporting.onnx_run import CachedDecoder, padded, session

    encoder = session(folder / "onnx" / "encoder_model.onnx")
    decoder = session(folder / "onnx" / "decoder_model_merged.onnx")
    answers: list[list[int]] = []
    for part in batches(rows):
        inputs = padded(part)
        (states,) = encoder.run(None, inputs)
        answers += CachedDecoder(decoder, shape, states, inputs["attention_mask"]).answers(shape, NEW_TOKENS)
    return answers


def in_ctranslate2(source: Path, shape: T5ModelConfig, rows: list[list[int]]) -> list[list[int]]:
    ctranslate2 = pytest.importorskip("ctranslate2")
    folder = source.parent / "ctranslate2"
    difference = export(settings(source, folder, "ctranslate2"))
    assert difference is not None and difference < 1e-5
    names = json.loads((folder / "shared_vocabulary.json").read_text())
    translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1, compute_type="float32")
    results = translator.translate_batch(
        [[names[number] for number in ids] for ids in rows],
        max_batch_size=TOGETHER,
        beam_size=1,
        min_decoding_length=0,
        max_decoding_length=NEW_TOKENS,
        end_token=names[shape.eos_token_id],
    )
    del translator
    shutil.rmtree(folder)
    numbers = {name: number for number, name in enumerate(names)}
    return [[numbers[name] for name in result.hypotheses[0]] for result in results]


def in_llama_cpp(source: Path, shape: T5ModelConfig, rows: list[list[int]]) -> list[list[int]]:
    pytest.importorskip("gguf")
    folder = source.parent / "gguf"
    export(settings(source, folder, "gguf"))
    model = LlamaModel(folder / "model-f32.gguf")
    answers = model.answers(rows, shape.start_token_id, shape.eos_token_id, NEW_TOKENS)
    model.close()
    shutil.rmtree(folder)
    return answers


HEADS = {
    "sequence": ({"head": "sequence", "labels": "yes,no"}, "ORTModelForSequenceClassification"),
    "regression": ({"head": "sequence", "labels": "regression"}, "ORTModelForSequenceClassification"),
    "token": ({"head": "token", "labels": "yes,no"}, "ORTModelForTokenClassification"),
    "none": ({"head": "none"}, "ORTModelForFeatureExtraction"),
    "embedding": ({"head": "embedding", "embedding_size": 12}, "ORTModelForCustomTasks"),
}


@pytest.mark.parametrize("runtime", ["optimum", "transformers.js"])
@pytest.mark.parametrize("kind", HEADS)
def test_heads_give_the_same_numbers_everywhere(kind: str, runtime: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    fields, name = HEADS[kind]
    model = small_encoder(tmp_path / "model", tokenizer, **fields)
    export(settings(tmp_path / "model", tmp_path / "out", "onnx"))
    sources, _ = fixed_ids(model.config)
    if runtime == "optimum":
        outputs = in_optimum(tmp_path / "out", sources=sources, **{"class": name})["outputs"]
    else:
        script = "AutoModel" if kind in ("none", "embedding") else name.replace("ORT", "Auto")
        outputs = in_transformers_js(tmp_path / "out", sources=sources, **{"class": script})["outputs"]
    if kind in ("token", "none"):  # Padded rows there follow each other here.
        outputs = [row for rows, ids in zip(outputs, sources, strict=True) for row in rows[: len(ids)]]
    expected = probe_logits(model).numpy()
    assert np.abs(np.array(outputs) - expected).max() < 1e-4 * np.abs(expected).max()


def test_llama_cpp_gives_an_encoder_of_published_width_its_vector(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = small_encoder(tmp_path / "model", tokenizer, head="none")
    export(settings(tmp_path / "model", tmp_path / "out", "gguf"))
    (ids, _), _ = fixed_ids(model.config)
    expected = model.encode(torch.tensor(ids), Rows((len(ids),))).detach().mean(0)
    vector = torch.tensor(LlamaModel(tmp_path / "out" / "model-f32.gguf").pooled(ids))
    assert torch.allclose(vector, expected, atol=2e-3 * float(expected.abs().max()))


def test_ctranslate2_gives_an_encoder_of_published_width_its_states(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    small_encoder(tmp_path / "model", tokenizer, head="none")
    difference = export(settings(tmp_path / "model", tmp_path / "out", "ctranslate2"))
    assert difference is not None and difference < 1e-5


def small_encoder(folder: Path, tokenizer: Tokenizer, **fields: str) -> T5:
    """The encoder of t5-small's width, with a head or without."""
    shape = dataclasses.replace(T5ModelConfig(**model_presets()["t5-small"]), num_decoder_layers=0, **fields)
    write_random_model(folder, shape)
    tokenizer.save(folder)
    return hf_format.load(folder)


@pytest.mark.parametrize("head", ["text", "sequence", "embedding"])
@pytest.mark.parametrize("program", ["optimum", "transformers.js"])
def test_the_code_of_a_card_runs_in_each_program(head: str, program: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    fields: dict[str, Any] = {} if head == "text" else {"num_decoder_layers": 0, "head": head}
    if head == "sequence":
        fields["labels"] = "yes,no"
    source, model = saved(tmp_path / "model", tokenizer, **fields)
    folder = tmp_path / "out"
    export(settings(source, folder, "onnx"))
    card = (folder / "README.md").read_text()
    if program == "optimum":
        if not OPTIMUM:
            pytest.skip("FRUGALT5_OPTIMUM_PYTHON names no Python with optimum-onnx")
        code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[1]
        words = [OPTIMUM, "-c", code]
    else:
        if not MODULES or shutil.which("node") is None:
            pytest.skip("FRUGALT5_TRANSFORMERS_JS names no node_modules with @huggingface/transformers")
        (code,) = re.findall(r"```javascript\n(.*?)```", card, re.DOTALL)
        (tmp_path / "node_modules").symlink_to(MODULES)
        (folder / "use.mjs").write_text(code)
        words = ["node", "use.mjs"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr
    if head == "text":
        (prompt,) = tokenizer.encode_prompts(["Your text"])
        (ids,) = generate(model, [[*prompt, tokenizer.eos_id]], max_new_tokens=GenerateConfig.max_new_tokens)
        assert done.stdout.strip() == tokenizer.decode(ids).strip()
