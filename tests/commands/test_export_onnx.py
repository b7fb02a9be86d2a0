"""Models as ONNX files: the numbers of every family and head, the layout that others load, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands.export import export
from commands.exporting.limits import runtime_notes
from data.text.templates import Template
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from model import hf_format
from model.decoding.generation import generate
from model.reference import T5Reference
from serving.model import Model
from settings.errors import DoesNotFit, UserError
from settings.program import start_command
from tests.commands.small import write_rows
from tests.commands.small_exports import SHAPES, TEXTS, WIDE, export_with_named_budget, saved, settings

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")
HEADS: dict[str, dict[str, Any]] = {
    "mean": {"head": "sequence", "labels": "yes,no,perhaps"},
    "first": {"head": "sequence", "labels": "yes,no,perhaps", "pooling": "first"},
    "last": {"head": "sequence", "labels": "yes,no,perhaps", "pooling": "last", "head_kind": "linear"},
    "regression": {"head": "sequence", "labels": "regression"},
    "token": {"head": "token", "labels": "yes,no,perhaps"},
    "none": {"head": "none"},
    "vectors": {"head": "embedding", "embedding_size": 12},
    "vectors_of_the_first": {"head": "embedding", "pooling": "first"},
    "vectors_of_any_length": {"head": "embedding", "pooling": "last", "normalize": False},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, "unigram", 700, 2**20)


@pytest.mark.parametrize("family", SHAPES)
def test_a_decoder_that_keeps_keys_and_values_gives_the_same_logits(
    family: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from commands.exporting.onnx_run import CachedDecoder, padded, session

    source, model = saved(tmp_path / "model", tokenizer, **SHAPES[family])
    export(settings(source, tmp_path / "out", "onnx"))
    reference = T5Reference(model.config).eval()
    reference.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 400, (length,), generator=generator).tolist() for length in (150, 9)]
    answers = torch.randint(3, 400, (2, 40), generator=generator)
    inputs = padded(rows)
    with torch.no_grad():
        expected = reference.logits(
            torch.from_numpy(inputs["input_ids"]), answers, torch.from_numpy(inputs["attention_mask"])
        ).numpy()
    for name in ("encoder_model", "decoder_model_merged"):
        onnx.checker.check_model(str(tmp_path / "out" / "onnx" / f"{name}.onnx"), full_check=True)
    (states,) = session(tmp_path / "out" / "onnx" / "encoder_model.onnx").run(None, inputs)
    graph = session(tmp_path / "out" / "onnx" / "decoder_model_merged.onnx")
    decoder = CachedDecoder(graph, model.config, states, inputs["attention_mask"])
    ends = (0, 1, 2, 20, 40)
    logits = [decoder.step(answers[:, start:end].numpy()) for start, end in pairwise(ends)]
    assert np.abs(np.concatenate(logits, axis=1) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_vectors_stand_beside_the_hidden_states(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Under the names that exports of sentence-transformers have, and with the prompts said."""
    source, model = saved(tmp_path / "model", tokenizer, num_decoder_layers=0, **HEADS["vectors"])
    (source / "settings.json").write_text('{"query_prompt": "ask: "}')
    export(settings(source, tmp_path / "out", "onnx", quantize="int8"))
    text = "ask: a river runs"
    ids = np.array([[*tokenizer.encode_prompts([text])[0].tolist(), tokenizer.eos_id]])
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    (expected,) = Model(source, mixed_precision="no").embed(["a river runs"], prompt_name="query")
    for suffix, tolerance in (("", 1e-5), ("_int8", 0.1)):
        there = onnxruntime.InferenceSession(str(tmp_path / "out" / "onnx" / f"model{suffix}.onnx"))
        states, vectors = there.run(["last_hidden_state", "sentence_embedding"], inputs)
        assert states.shape == (1, ids.shape[1], model.config.d_model)
        np.testing.assert_allclose(vectors[0], expected, atol=tolerance)
    assert "ask: Your question" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("kind", HEADS)
def test_heads_and_encoders_are_one_graph_with_the_same_outputs(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source, _ = saved(tmp_path / "model", tokenizer, **{"num_decoder_layers": 0, **HEADS[kind]})
    difference = export(settings(source, tmp_path / "out", "onnx"))
    assert difference is not None and difference < 1e-5
    onnx.checker.check_model(str(tmp_path / "out" / "onnx" / "model.onnx"), full_check=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if "yes" in HEADS[kind].get("labels", ""):
        assert config["id2label"] == {"0": "yes", "1": "no", "2": "perhaps"}
        assert config["label2id"] == {"yes": 0, "no": 1, "perhaps": 2}
    assert not (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("precision", ["fp16", "int8", "q4"])
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_a_smaller_copy_stands_beside_the_files_and_is_compared(
    precision: str, family: str, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if precision == "q4":
        pytest.importorskip("onnx_ir")
    wide = {"d_model": 64, "d_ff": 512}
    source, _ = saved(tmp_path / "model", tokenizer, **wide, **SHAPES[family])
    export(settings(source, tmp_path / "out", "onnx", quantize=precision))
    folder = tmp_path / "out" / "onnx"
    share = {"fp16": 0.75, "int8": 0.5, "q4": 0.5}[precision]  # Of so small a model, nodes are a large part.
    for name in ("encoder_model", "decoder_model_merged"):
        assert (folder / f"{name}_{precision}.onnx").stat().st_size < share * (folder / f"{name}.onnx").stat().st_size
    assert precision in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "t5" and config["transformers.js_config"]["dtype"] == precision
    assert f"| {precision} |" in (tmp_path / "out" / "README.md").read_text()


def that_knows(answers: dict[str, str], folder: Path, tokenizer: Tokenizer) -> Path:
    """A small model that has learnt what to answer to some texts."""
    from commands.exporting.onnx_run import padded

    source, model = saved(folder, tokenizer)
    inputs = padded([[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_prompts(list(answers))])
    targets = padded([[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_batch(list(answers.values()))])
    sources, mask, labels = map(torch.from_numpy, (*inputs.values(), targets["input_ids"]))
    starts = torch.full((len(answers), 1), model.config.start_token_id)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        logits = model.logits(sources, torch.cat([starts, labels[:, :-1]], dim=1), mask)
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hf_format.save(model, source)
    return source


def test_right_answers_to_held_out_rows_are_counted_in_each_precision(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = that_knows({"a river": "bridge 3", "it's 3": "runs", "中文": "under a"}, tmp_path / "model", tokenizer)
    of_run = {"a river": "bridge 3", "it's 3": "o'clock", "中文": "under a"}
    files = {
        name: write_rows(tmp_path / f"{name}.jsonl", ({"prompt": text, "response": of_run[text]} for text in texts))
        for name, texts in {"run": list(of_run), "named": ["a river", "it's 3"]}.items()
    }
    facts = {"objective": "pairs", "is_finetune": True, "validation_file": str(files["run"])}
    (source / "settings.json").write_text(json.dumps(facts))
    flags = {"cache_dir": str(tmp_path / "cache"), "quantize": "fp16"}
    export(settings(source, tmp_path / "out", "onnx", **flags))
    assert "fp32 66.67%, fp16 66.67%" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out" / "README.md").read_text().count("| 66.67% |") == 2
    export(settings(source, tmp_path / "again", "onnx", validation_file=str(files["named"]), **flags))
    assert "fp32 50.00%, fp16 50.00%" in " ".join(capsys.readouterr().out.split())


def test_rows_are_refused_where_no_answers_are_compared(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    source, _ = saved(tmp_path / "model", tokenizer)
    with pytest.raises(UserError, match=r"--eval_generate_rows.*--format=gguf"):
        export(settings(source, tmp_path / "out", "gguf", eval_generate_rows="8"))


@pytest.mark.parametrize("names", ["{a},{b}", "news={a},law={b}"])
def test_the_runs_rows_may_lie_in_several_files(
    names: str, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = saved(tmp_path / "model", tokenizer)
    files = {
        name: str(write_rows(tmp_path / f"{name}.jsonl", [{"prompt": f"a river {name}", "response": "runs"}]))
        for name in ("a", "b")
    }
    facts = {"objective": "pairs", "is_finetune": True, "validation_file": names.format(**files)}
    (source / "settings.json").write_text(json.dumps(facts))
    export(settings(source, tmp_path / "out", "onnx", quantize="fp16", cache_dir=str(tmp_path / "cache")))
    assert "of 2 held-out rows" in " ".join(capsys.readouterr().out.split())


def test_rows_of_the_run_that_are_not_usable_any_more_are_no_error(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = saved(tmp_path / "model", tokenizer)
    other = write_rows(tmp_path / "other.jsonl", [{"question": "a river", "score": 3}])
    for path in (other, tmp_path / "missing.jsonl"):
        facts = {"objective": "pairs", "is_finetune": True, "validation_file": str(path)}
        (source / "settings.json").write_text(json.dumps(facts))
        flags = {"quantize": "fp16", "overwrite": "True", "cache_dir": str(tmp_path / "cache")}
        export(settings(source, tmp_path / "out", "onnx", **flags))
        output = " ".join(capsys.readouterr().out.split())
        assert "validation file" in output and path.name in output and "answered right" not in output
        with pytest.raises(UserError, match=path.name):
            export(settings(source, tmp_path / "out", "onnx", validation_file=str(path), **flags))


@pytest.mark.parametrize("flag", ["validation_file", "eval_generate_rows"])
def test_rows_are_refused_where_nothing_answers(flag: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "model", tokenizer, num_decoder_layers=0, head="none")
    with pytest.raises(UserError, match=f"--{flag} = 8, is for models that write text"):
        export(settings(source, tmp_path / "out", "onnx", quantize="int8", **{flag: "8"}))


@pytest.mark.parametrize("quantize", ["none", "fp16", "int8"])
def test_the_budget_that_a_refusal_names_is_enough(quantize: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """With both graphs open while rows are answered."""
    source, _ = saved(tmp_path / "model", tokenizer, **WIDE)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a river", "response": "runs"}])
    flags = {"validation_file": rows, "cache_dir": tmp_path / "cache", "quantize": quantize}
    export_with_named_budget(model=source, output=tmp_path / "out", format="onnx", **flags)


def test_labels_keep_the_names_that_are_published(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Also those that the setting cannot hold, with a comma in them."""
    fields = {"num_decoder_layers": 0, "head": "sequence", "labels": "3"}
    source, _ = saved(tmp_path / "model", tokenizer, **fields)
    names = {"0": "Food, drink", "1": "Sports", "2": "Arts"}
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "id2label": names}))
    export(settings(source, tmp_path / "out", "onnx"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == names


def test_large_weights_lie_beside_their_graph(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commands.exporting.onnx_store.MOST_INSIDE_BYTES", 1000)
    source, _ = saved(tmp_path / "model", tokenizer)
    difference = export(settings(source, tmp_path / "out", "onnx", quantize="fp16"))
    assert difference is not None and difference < 1e-5
    names = {path.name for path in (tmp_path / "out" / "onnx").iterdir()}
    graphs = {f"{name}{end}.onnx" for name in ("encoder_model", "decoder_model_merged") for end in ("", "_fp16")}
    assert names == graphs | {f"{name}_data" for name in graphs}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["transformers.js_config"]["use_external_data_format"] == dict.fromkeys(graphs, True)


def test_a_copy_that_takes_more_than_the_budget_is_refused_before_work(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "model", tokenizer, d_model=1024, d_ff=4096, num_heads=8, d_kv=64)
    with pytest.raises(DoesNotFit, match="quantize=none"):
        export(settings(source, tmp_path / "out", "onnx", quantize="int8", memory_budget="600M"))
    assert not (tmp_path / "out").exists()


def test_onnxruntime_notes_no_events_for_its_makers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "model", tokenizer)
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    words = [*start_command(), "export", f"--model={source}", "--format=onnx", f"--output={tmp_path / 'out'}"]
    subprocess.run(words, env=environment, check=True, capture_output=True, timeout=300)
    assert not list((tmp_path / "home").rglob("*onnxruntime*"))


def test_the_code_of_a_card_runs_as_it_is(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, model = saved(tmp_path / "model", tokenizer, num_layers=2, num_decoder_layers=3)
    (source / "generation_config.json").write_text('{"max_new_tokens": 12}')
    Template.load("Q: {prompt} A:", "tell: ").save(source)
    export(settings(source, tmp_path / "out", "onnx"))
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    capsys.readouterr()
    exec(code, {})
    (prompt,) = tokenizer.encode_prompts(["tell: Q: Your text A:"])
    (answer,) = generate(model, [[*prompt, tokenizer.eos_id]], max_new_tokens=12)
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(answer).rstrip("\n")


def test_what_a_program_cannot_do_is_said_at_export(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = saved(tmp_path / "model", tokenizer)
    path = source / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 4}))
    (source / "answers.txt").write_text("a river\na bridge\n")
    export(settings(source, tmp_path / "out", "onnx"))
    output = " ".join(capsys.readouterr().out.split())
    assert "beam search" in output and "prefix_allowed_tokens_fn" in output
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["num_beams"] == 4


@pytest.mark.parametrize(
    ("form", "decoding", "words"),
    [
        ("ctranslate2", {"num_beams": 4, "min_new_tokens": 2}, ["beam_size=4", "min_decoding_length=2", "score_batch"]),
        ("ctranslate2", {}, ["beam_size=1"]),
        ("onnx", {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, ["top_p"]),
        ("gguf", {"repetition_penalty": 1.5}, ["--temp 0.0", "--repeat-penalty 1.5", "--grammar"]),
        ("gguf", {"no_repeat_ngram_size": 3}, ["no_repeat_ngram_size"]),
        ("onnx", {"split_prompts": "sentence"}, ["split_prompts"]),
    ],
)
def test_settings_are_named_as_each_program_calls_them(form: str, decoding: dict[str, Any], words: list[str]) -> None:
    text = " ".join(runtime_notes(form, decoding, has_answer_list=True))
    assert all(word in text for word in words)
