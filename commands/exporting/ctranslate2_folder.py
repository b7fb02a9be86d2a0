"""A T5 as a folder that CTranslate2 runs: its specification filled with our weights, and the vocabulary.

CTranslate2's own converter reads our folders through transformers. It names unused ids like sentinels, and scales no
output of a head of its own: what it writes answers otherwise. This one does not, and needs neither transformers nor the
memory that takes. As with its folders, the tokens of a source end with `</s>`, which transformers' tokenizers write.
Source: ctranslate2/converters/transformers.py, T5Loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commands.convert import fixed_ids, probe_logits
from commands.exporting.exported import Comparison, Exported
from model.rows import Rows
from model.shapes import DECODER, ENCODER, STACKS, Stack, inner_width, weight_counts, weights
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.program import needs
from support.units import MIB

QUANTIZATIONS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
QUANTIZED = {"int8": "int8"}  # fp16 is a dtype of the model by now; no CPU and no GPU is quick with 4 bits there.
LIBRARY_BYTES = 40 * MIB  # Its threads and vocabulary, and what it computes with; measured.
USE = "{python} -c 'import ctranslate2, sys; ctranslate2.Translator(sys.argv[1])' {folder}"
ENCODER_USE = "{python} -c 'import ctranslate2, sys; ctranslate2.Encoder(sys.argv[1])' {folder}"
_ACTIVATIONS = {"relu": "RELU", "gated-gelu": "GELUTanh", "gated-silu": "SWISH"}


def bytes_beside(shape: T5ModelConfig, precision: str) -> int:
    """Bytes that are held beside the model at the highest, while it is quantized or while CTranslate2 runs it.

    Quantized are copies in fp32, of which the joined matrices of attention are copied once more, each with two more
    copies while its scales are applied. CTranslate2 runs weights in fp32, and packs those of products once more.
    """
    counts = weight_counts(shape)
    bytes_held = 4 * (2 * counts["total"] - counts["embedding"])
    if precision == "int8":
        joined = (3 * shape.num_layers + 5 * shape.num_decoder_layers) * shape.d_model * inner_width(shape)
        largest = max(weight.size for weight in weights(shape))
        bytes_held = max(bytes_held, 4 * (counts["total"] + joined + 2 * largest))
    return LIBRARY_BYTES + bytes_held


def write(exported: Exported, folder: Path) -> Path:
    """Write `model.bin`, `config.json` and the vocabulary into a folder.

    Raises:
        UserError: the package ctranslate2 is missing, or it has nothing that computes this model.
    Memory: the model once more: joined matrices of attention, or all that are quantized.
    """
    ctranslate2 = needs("ctranslate2", "--format = ctranslate2")
    model = exported.model
    vocabulary = exported.vocabulary
    shape = model.config
    if shape.num_labels:
        raise UserError(
            "--model = an encoder with labels (--head={head}), CTranslate2 has no such heads for T5; use --format=onnx",
            head=shape.head,
        )
    if shape.gives_vectors and shape.embedding_size:
        raise UserError(
            "--model = a dense layer after pooling (--embedding_size={size}), CTranslate2 has none for T5; use "
            "--format=onnx",
            size=shape.embedding_size,
        )
    if exported.quantize == "q4":
        raise UserError("--quantize = q4, is not supported by CTranslate2; allowed: none, fp16, int8")
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if exported.quantize == "int8":  # Its numbers are scaled where they lie.
        values = {name: value.clone() for name, value in values.items()}
    pieces = distinct(vocabulary.texts)
    spec = (_translator if shape.num_decoder_layers else _encoder)(ctranslate2.specs, shape, values, pieces)
    spec.config.eos_token = pieces[vocabulary.eos_id]
    if vocabulary.unk_id is not None:
        spec.config.unk_token = pieces[vocabulary.unk_id]
    spec.validate()
    spec.optimize(quantization=_stored(exported))
    spec.save(str(folder))
    return folder / "model.bin"


def _stored(exported: Exported) -> str:
    """What CTranslate2 calls the numbers of the matrices."""
    return QUANTIZED.get(exported.quantize) or QUANTIZATIONS[exported.model.embedding.dtype]


def check(exported: Exported, folder: Path) -> list[Comparison]:
    """Log-probabilities of fixed answers there and here, or hidden states of an encoder, or vectors that are made of
    them.
    """
    config = exported.model.config
    ctranslate2 = needs("ctranslate2", "--format = ctranslate2")
    expected = probe_logits(exported.model).detach()  # Before the other program holds its weights.
    runner = ctranslate2.Translator if config.num_decoder_layers else ctranslate2.Encoder
    runs = runner(str(folder), device="cpu", intra_threads=1, compute_type="float32")
    sources, steps = fixed_ids(config)
    if config.num_decoder_layers:
        answers = torch.stack(steps[1:], dim=1)
        expected = torch.log_softmax(expected, dim=-1)[:, :-1].gather(-1, answers[..., None])[..., 0]
        names = distinct(exported.vocabulary.texts)
        prompts, targets = ([[names[number] for number in row] for row in rows] for rows in (sources, answers.tolist()))
        results = runs.score_batch(prompts, targets)
        numbers = torch.tensor([result.log_probs[: answers.shape[1]] for result in results])
    else:
        states = torch.tensor(np.array(runs.forward_batch(sources).last_hidden_state))
        numbers = torch.cat([row[: len(source)] for row, source in zip(states, sources, strict=True)])
        head = exported.model.embedding_head
        if head is not None:
            numbers = head(head.pool(numbers, Rows(tuple(map(len, sources)))))
    difference = float((numbers - expected).abs().max() / expected.abs().max())
    return [Comparison(_stored(exported), difference, is_rounded=exported.quantize == "int8")]


def distinct(pieces: Sequence[str]) -> list[str]:
    """Pieces by id; one that comes twice, as a damaged vocabulary has it, gets another name."""
    names: dict[str, None] = {}
    for number, piece in enumerate(pieces):
        names[f"{piece}[{number}]" if piece in names else piece] = None
    return list(names)


def _translator(specs: Any, shape: T5ModelConfig, values: dict[str, Tensor], pieces: list[str]) -> Any:
    spec = specs.TransformerSpec.from_config(
        (shape.num_layers, shape.num_decoder_layers), shape.num_heads, **_architecture(specs, shape)
    )
    for stack in STACKS:
        _fill_stack(spec, values, shape, stack)
    spec.decoder.projection.weight = values.get("head", values["embedding"])
    if shape.scale_decoder_outputs:
        spec.decoder.scale_outputs = shape.d_model**-0.5
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.bos_token = spec.config.decoder_start_token = pieces[shape.start_token_id]
    spec.config.add_source_eos = False
    return spec


def _encoder(specs: Any, shape: T5ModelConfig, values: dict[str, Tensor], pieces: list[str]) -> Any:
    encoder = specs.TransformerEncoderSpec(shape.num_layers, shape.num_heads, **_architecture(specs, shape))
    spec = specs.TransformerEncoderModelSpec(encoder)
    _fill_stack(spec, values, shape, ENCODER)
    spec.register_vocabulary(pieces)
    return spec


def _architecture(specs: Any, shape: T5ModelConfig) -> dict[str, Any]:
    return {
        "pre_norm": True,
        "activation": getattr(specs.Activation, _ACTIVATIONS[shape.feed_forward_proj]),
        "ffn_glu": shape.feed_forward_proj.startswith("gated-"),
        "relative_attention_bias": True,
        "rms_norm": True,
    }


def _fill_stack(spec: Any, values: dict[str, Tensor], shape: T5ModelConfig, stack: Stack) -> None:
    side = getattr(spec, stack)
    embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
    embeddings.weight = values["embedding"]
    side.scale_embeddings = False
    side.layer_norm.gamma = values[f"{stack}.final_norm.weight"]
    for number, layer in enumerate(side.layer):
        inside = {name.removeprefix(f"{stack}.blocks.{number}."): value for name, value in values.items()}
        table = inside.get("bias.table", values.get(f"{stack}.bias.table"))
        _fill_attention(layer.self_attention, inside, "attention", joined=3)
        layer.self_attention.layer_norm.gamma = inside["attention_norm.weight"]
        layer.self_attention.relative_attention_bias = table
        layer.self_attention.relative_attention_max_distance = np.int32(shape.relative_attention_max_distance)
        if stack == DECODER:
            _fill_attention(layer.attention, inside, "cross_attention", joined=1)
            layer.attention.layer_norm.gamma = inside["cross_norm.weight"]
        _fill_feed_forward(layer.ffn, inside)


def _fill_attention(spec: Any, inside: dict[str, Tensor], name: str, joined: int) -> None:
    """Queries, keys and values: one matrix in self-attention, queries alone across. T5 does not scale queries."""
    matrices = [inside[f"{name}.{role}.weight"] for role in ("q", "k", "v")]
    spec.queries_scale = 1.0
    spec.linear[0].weight = torch.cat(matrices[:joined])
    if joined < 3:
        spec.linear[1].weight = torch.cat(matrices[joined:])
    spec.linear[-1].weight = inside[f"{name}.o.weight"]


def _fill_feed_forward(spec: Any, inside: dict[str, Tensor]) -> None:
    gate = inside.get("feed_forward.gate.weight")
    if gate is None:
        spec.linear_0.weight = inside["feed_forward.wi.weight"]
    else:
        spec.linear_0.weight = gate
        spec.linear_0_noact.weight = inside["feed_forward.wi.weight"]
    spec.linear_1.weight = inside["feed_forward.wo.weight"]
    spec.layer_norm.gamma = inside["feed_forward_norm.weight"]
