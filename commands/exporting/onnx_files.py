"""A T5 as ONNX files with a cache, in the folder that transformers.js and Optimum load: `onnx/encoder_model.onnx` and
`onnx/decoder_model_merged.onnx`, or `onnx/model.onnx` of an encoder and of other heads; beside them a copy of less
precision with the suffix of transformers.js.

The weights are fp32: runtimes on CPUs multiply no bf16.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto

from commands.convert import fixed_ids, probe_logits
from commands.exporting.exported import Comparison, Exported
from commands.exporting.onnx_graph import decoder_graph, encoder_graph, label_graph, vector_graph
from commands.exporting.onnx_quantize import TOOL_SHARES, halve, need_packages, quantize
from commands.exporting.onnx_run import Array, CachedDecoder, padded, session
from commands.exporting.onnx_store import MOST_INSIDE_BYTES, PIECE_BYTES, store
from commands.new_folder import keep_label_names
from engine.weights import weight_store_for
from model import hf_format
from model.decoding.generation import generate
from model.formats.shape_file import CONFIG_FILE
from model.shapes import DECODER, ENCODER, weight_counts
from settings.declared import T5ModelConfig
from settings.tasks import MODEL_HEADS
from support.units import MIB

USE = "{python} -c 'import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1])' {file}"
SUBFOLDER = "onnx"
COPIES = ("fp16", "int8", "q4")  # Precisions of copies, which are suffixes of their names.
ENCODER_STEM = "encoder_model"
DECODER_STEM = "decoder_model_merged"
WHOLE_STEM = "model"
LIBRARY_BYTES = 24 * MIB  # onnxruntime's threads and graphs, and what it computes with.
# Greedy answers that are compared.
ANSWERS = 8
SOURCE_TOKENS = 16
ANSWER_TOKENS = 8


def graph_bytes(shape: T5ModelConfig) -> tuple[int, int]:
    """Bytes of the weights of the encoder's graph and of the decoder's, in fp32."""
    counts = weight_counts(shape)
    tables = counts["embedding"] if shape.tie_word_embeddings else counts["embedding"] + counts["head"]
    return (
        4 * (counts["embedding"] + shape.num_layers * counts[ENCODER]),
        4 * (tables + shape.num_decoder_layers * counts[DECODER]),
    )


def bytes_beside(shape: T5ModelConfig, precision: str) -> int:
    """Bytes that are held beside the model at the highest: a graph in onnxruntime, or in one of its tools.

    Raises:
        UserError: the precision needs a package that is missing.
    """
    need_packages(precision)
    graphs = graph_bytes(shape)
    in_session = max(session_bytes(size, precision) for size in graphs)
    in_tool = int(max(graphs) * TOOL_SHARES.get(precision, 0))
    return LIBRARY_BYTES + 2 * PIECE_BYTES + max(in_session, in_tool)


def session_bytes(size: int, precision: str) -> int:
    """Bytes that onnxruntime holds of the weights of a graph.

    Args:
        size: of the weights in fp32. precision: of the copy that is run too.
    """
    if precision == "fp16":  # A CPU's onnxruntime makes fp32 of it.
        return size + min(size // 2, MOST_INSIDE_BYTES)
    # onnxruntime copies what lies inside a graph; what lies beside it stays in its file.
    return size if size <= MOST_INSIDE_BYTES else 0


def write(exported: Exported, folder: Path) -> Path:
    """Write the graphs, a copy of each in the precision that was asked for, and `config.json`.

    Returns:
        the graph that gives the model's output.
    Raises:
        UserError: a package is missing.
    Memory: pieces of a tensor; int8 and q4 as `TOOL_SHARES` says.
    """
    config = exported.model.config
    weights = {key: weight.detach() for key, weight in exported.model.named_parameters()}
    (folder / SUBFOLDER).mkdir()
    are_beside: dict[str, bool] = {}
    path = folder
    for stem, (graph, names) in _graphs(config):
        path = folder / SUBFOLDER / f"{stem}.onnx"
        are_beside[path.name] = store(graph, names, weights, config, path)
        copy = path.with_name(f"{stem}_{exported.quantize}.onnx")
        if exported.quantize == "fp16":
            half = halve(graph, names)
            are_beside[copy.name] = store(graph, names, weights, config, copy, half)
        elif exported.quantize != "none":
            are_beside[copy.name] = quantize(path, copy, exported.quantize)
    _write_config(config, exported.quantize, are_beside, folder)
    if exported.labels_of is not None:
        keep_label_names(exported.labels_of, folder)
    return path


def _graphs(config: T5ModelConfig) -> Iterator[tuple[str, tuple[ModelProto, list[str]]]]:
    """The graphs of a model by the names of their files, the one that gives its output last."""
    if MODEL_HEADS[config.head].writes_text:
        yield ENCODER_STEM, encoder_graph(config)
        yield DECODER_STEM, decoder_graph(config)
        return
    graph = encoder_graph
    if config.num_labels:
        graph = label_graph
    if config.gives_vectors:
        graph = vector_graph
    yield WHOLE_STEM, graph(config)


def _write_config(config: T5ModelConfig, precision: str, are_beside: Mapping[str, bool], folder: Path) -> None:
    """Write `config.json` as transformers.js and Optimum read it.

    transformers.js knows no UMT5, and the graphs have its bias tables, so it is a T5 there. Of T5 it knows those that
    write text alone; encoders and heads are called BERT, which it loads as one graph from ids and mask to
    `last_hidden_state`, `sentence_embedding` or `logits`, as these are.
    """
    hf_format.write_config(replace(config, bias_in_every_layer=False), folder, torch.float32)
    path = folder / CONFIG_FILE
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    if not MODEL_HEADS[config.head].writes_text:
        ending = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}.get(config.head, "Model")
        content["model_type"] = "bert"
        content["architectures"] = [f"Bert{ending}"]
        content["is_encoder_decoder"] = False
        content["hidden_size"] = config.d_model
        content["num_attention_heads"] = config.num_heads
        content["num_hidden_layers"] = config.num_layers
    content["transformers.js_config"] = {
        "dtype": "fp32" if precision == "none" else precision,
        "use_external_data_format": are_beside,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


@torch.no_grad()
def check(exported: Exported, folder: Path) -> list[Comparison]:
    """Run what was written, and its copies of less precision, on fixed ids."""
    model = exported.model
    expected = probe_logits(model).numpy()
    answers: list[list[int]] = []
    if MODEL_HEADS[model.config.head].writes_text:
        weight_store = weight_store_for(model.embedding.dtype, torch.float32)
        answers = generate(
            model,
            fixed_sources(model.config, ANSWERS),
            max_new_tokens=ANSWER_TOKENS,
            with_weights=weight_store.in_compute_dtype,
            compute_dtype=torch.float32,
        )
    copies = [] if exported.quantize == "none" else [exported.quantize]
    comparisons = []
    for precision in ("fp32", *copies):
        suffix = "" if precision == "fp32" else f"_{precision}"
        outputs, answers_there = _run(model.config, folder, suffix)
        difference = float(np.abs(outputs - expected).max() / np.abs(expected).max())
        equal = sum(map(list.__eq__, answers_there, answers)) if answers else None
        identical = None
        if exported.held_out is not None:
            encoder, decoder = (folder / SUBFOLDER / f"{stem}{suffix}.onnx" for stem in (ENCODER_STEM, DECODER_STEM))
            identical = exported.held_out.identical(encoder, decoder, model.config)
        comparisons.append(
            Comparison(
                precision,
                difference,
                precision != "fp32",
                equal,
                len(answers),
                sum(path.stat().st_size for path in graph_files(folder, precision)),
                identical,
            )
        )
    return comparisons


def graph_files(folder: Path, precision: str) -> Iterator[Path]:
    """The files of a model's graphs in a precision, weights that lie beside a graph with it."""
    for path in (folder / SUBFOLDER).iterdir():
        stem = path.name.partition(".")[0]  # `model.onnx` may have its weights in `model.onnx_data`.
        copied = next((word for word in COPIES if stem.endswith(f"_{word}")), "fp32")
        if copied == precision:
            yield path


def _run(config: T5ModelConfig, folder: Path, suffix: str) -> tuple[Array, list[list[int]]]:
    """Outputs of a model for fixed ids, and its answers to fixed sources; one session at a time."""
    sources, steps = fixed_ids(config)
    inputs = padded(sources)
    if not MODEL_HEADS[config.head].writes_text:
        # Vectors of texts are the last output.
        outputs = session(folder / SUBFOLDER / f"{WHOLE_STEM}{suffix}.onnx").run(None, inputs)[-1]
        # Rows are padded there, and follow each other here.
        return outputs if config.pools_rows else outputs[inputs["attention_mask"] == 1], []
    further = padded(fixed_sources(config, ANSWERS))
    encoder = session(folder / SUBFOLDER / f"{ENCODER_STEM}{suffix}.onnx")
    (states,) = encoder.run(None, inputs)
    (further_states,) = encoder.run(None, further)
    del encoder
    gc.collect()
    decoder = session(folder / SUBFOLDER / f"{DECODER_STEM}{suffix}.onnx")
    answering = CachedDecoder(decoder, config, states, inputs["attention_mask"])
    ids = torch.stack(steps, dim=1).numpy()
    outputs = np.concatenate([answering.step(ids[:, :1]), answering.step(ids[:, 1:])], axis=1)
    answering = CachedDecoder(decoder, config, further_states, further["attention_mask"])
    return outputs, answering.answers(config, ANSWER_TOKENS)


def fixed_sources(config: T5ModelConfig, count: int) -> Sequence[list[int]]:
    """So many sources of ids drawn by chance, always the same of one vocabulary, half as long to `SOURCE_TOKENS`."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, config.vocab_size, (count, SOURCE_TOKENS - 1), generator=generator).tolist()
    return [
        [*row[: SOURCE_TOKENS // 2 + number % (SOURCE_TOKENS // 2)], config.eos_token_id]
        for number, row in enumerate(rows)
    ]
