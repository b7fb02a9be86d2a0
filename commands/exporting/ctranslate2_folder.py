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

from commands.exporting.vocabulary import Vocabulary
from model.shapes import DECODER, STACKS, Stack
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.program import needs

QUANTIZATIONS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ACTIVATIONS = {"relu": "RELU", "gated-gelu": "GELUTanh", "gated-silu": "SWISH"}


def write_ctranslate2(model: T5, vocabulary: Vocabulary, folder: Path, name: str = "") -> Path:
    """Write `model.bin`, `config.json` and the vocabulary into a folder.
    Raises:
        UserError: the package ctranslate2 is missing.
    Memory: the model once more: joined matrices of attention.
    """
    ctranslate2 = needs("ctranslate2", "--format = ctranslate2")
    shape = model.config
    specs = ctranslate2.specs
    spec = specs.TransformerSpec.from_config(
        (shape.num_layers, shape.num_decoder_layers),
        shape.num_heads,
        pre_norm=True,
        activation=getattr(specs.Activation, _ACTIVATIONS[shape.feed_forward_proj]),
        ffn_glu=shape.feed_forward_proj.startswith("gated-"),
        relative_attention_bias=True,
        rms_norm=True,
    )
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for stack in STACKS:
        _fill_stack(spec, values, shape, stack)
    spec.decoder.projection.weight = values.get("head", values["embedding"])
    if shape.scale_decoder_outputs:
        spec.decoder.scale_outputs = shape.d_model**-0.5
    pieces = distinct(vocabulary.texts)
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.bos_token = spec.config.decoder_start_token = pieces[shape.start_token_id]
    spec.config.eos_token = pieces[vocabulary.eos_id]
    if vocabulary.unk_id is not None:
        spec.config.unk_token = pieces[vocabulary.unk_id]
    spec.config.add_source_eos = False
    spec.validate()
    spec.optimize(quantization=QUANTIZATIONS[model.embedding.dtype])
    spec.save(str(folder))
    return folder / "model.bin"


def distinct(pieces: Sequence[str]) -> list[str]:
    """Pieces by id; one that comes twice, as a damaged vocabulary has it, gets another name."""
    names: dict[str, None] = {}
    for number, piece in enumerate(pieces):
        names[f"{piece}[{number}]" if piece in names else piece] = None
    return list(names)


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
