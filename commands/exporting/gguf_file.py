"""A T5 as a file that llama.cpp runs: tensors under its names, sizes and tokenizer as metadata.

llama.cpp computes T5 1.1: it never scales the decoder's output. A T5 1.0 is scaled by d_model^-0.5, so its final norm
is written that much smaller, which is the same function. It knows ReLU and gated GELU, and distances up to 128.
Source: llama.cpp, conversion/t5.py, src/models/t5.cpp, src/llama-vocab.cpp; gguf.constants.MODEL_ARCH.T5.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from commands.exporting.vocabulary import Vocabulary
from model.shapes import Weight, weights
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.program import needs
from support.language import say

CONTEXT_TOKENS = 512  # what llama.cpp assumes of a T5, which has no limit of its own
MAX_DISTANCE = 128  # beyond which llama.cpp has one bucket, whatever a file says
# llama.cpp loads no byte-level vocabulary without a merge: this one is of bytes 0xC0 and 0xC1, which UTF-8 never has
NO_MERGE = "\u00c0 \u00c1"
STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PARTS = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_o",
    "bias table": "attn_rel_b",
    "gate": "ffn_gate",
    "wi": "ffn_up",
    "wo": "ffn_down",
}
_NORMS = {"attention_norm": "attn_norm", "cross_norm": "cross_attn_norm", "feed_forward_norm": "ffn_norm"}


def write_gguf(model: T5, vocabulary: Vocabulary, folder: Path, name: str) -> Path:
    """Write `model-<dtype>.gguf` into a folder: matrices in the model's dtype, norms and bias tables in fp32.

    Args:
        name: of the model, for readers.
    Returns:
        the file.
    Raises:
        UserError: the package gguf is missing, or llama.cpp has no such model.
    Memory: one tensor.
    """
    gguf = needs("gguf", "--format = gguf")
    refuse_unknown(model.config, vocabulary)
    kind = STORED[model.embedding.dtype]
    path = folder / f"model-{kind.lower()}.gguf"
    writer = gguf.GGUFWriter(str(path), "t5")
    _describe(writer, gguf, model.config, name, kind)
    _write_vocabulary(writer, gguf, vocabulary, model.config.start_token_id)
    parameters = dict(model.named_parameters())
    for weight in weights(model.config):
        dtype = _dtype(weight, kind)
        size = weight.size * (4 if dtype == "F32" else 2)
        raw_dtype = gguf.GGMLQuantizationType[dtype]
        writer.add_tensor_info(gguf_name(weight), weight.shape, np.dtype(np.float32), size, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for weight in weights(model.config):
        writer.write_tensor_data(_values(weight, parameters[weight.name], model.config, _dtype(weight, kind)))
    writer.close()
    return path


def refuse_unknown(shape: T5ModelConfig, vocabulary: Vocabulary) -> None:
    """Raise a UserError where llama.cpp would compute something else than this model does."""
    problems: list[str] = []
    if shape.feed_forward_proj not in ("relu", "gated-gelu"):
        text = "--model = feed_forward_proj {feed_forward_proj}, llama.cpp supports only relu and gated-gelu"
        problems.append(say(text, feed_forward_proj=shape.feed_forward_proj))
    distance = shape.relative_attention_max_distance
    if distance != MAX_DISTANCE:
        text = (
            "--model = relative_attention_max_distance {relative_attention_max_distance}, llama.cpp supports only "
            "{max_distance}"
        )
        problems.append(say(text, relative_attention_max_distance=distance, max_distance=MAX_DISTANCE))
    if vocabulary.model != "Unigram" and not (vocabulary.model == "BPE" and vocabulary.is_bytewise):
        text = "--model = a tokenizer of kind {model}, llama.cpp reads byte-level BPE and Unigram"
        problems.append(say(text, model=vocabulary.model))
    if problems:
        raise UserError(*(say("{problem}; use --format=ctranslate2 or onnx", problem=problem) for problem in problems))


def gguf_name(weight: Weight) -> str:
    """A weight's name in llama.cpp: `enc.blk.0.attn_q.weight`, `dec.blk.0.cross_attn_o.weight`, ..."""
    if weight.role == "embedding":
        return "token_embd.weight"
    if weight.role == "head":
        return "output.weight"
    assert weight.stack is not None
    side = weight.stack[:3]
    if weight.role == "norm" and weight.block is None:
        return f"{side}.output_norm.weight"
    part = _NORMS[weight.name.split(".")[-2]] if weight.role == "norm" else _PARTS[weight.role]
    cross = "cross_" if ".cross_attention." in weight.name else ""
    return f"{side}.blk.{weight.block or 0}.{cross}{part}.weight"


def _dtype(weight: Weight, kind: str) -> str:
    return "F32" if weight.role in ("norm", "bias table") else kind


def _values(weight: Weight, parameter: torch.Tensor, shape: T5ModelConfig, dtype: str) -> np.ndarray[Any, Any]:
    values = parameter.detach()
    if weight.name == "decoder.final_norm.weight" and shape.scale_decoder_outputs:
        values = values.float() * shape.d_model**-0.5
    if dtype == "BF16":
        return values.to(torch.bfloat16).view(torch.int16).numpy()
    return values.to(torch.float16 if dtype == "F16" else torch.float32).numpy()


def _describe(writer: Any, gguf: ModuleType, c: T5ModelConfig, name: str, kind: str) -> None:
    writer.add_name(name)
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(c.d_model)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_block_count(c.num_layers)
    writer.add_decoder_block_count(c.num_decoder_layers)
    writer.add_head_count(c.num_heads)
    writer.add_key_length(c.d_kv)
    writer.add_value_length(c.d_kv)
    writer.add_layer_norm_eps(c.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(c.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(c.relative_attention_num_buckets)
    writer.add_decoder_start_token_id(c.start_token_id)
    writer.add_vocab_size(c.vocab_size)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])


def _write_vocabulary(writer: Any, gguf: ModuleType, vocabulary: Vocabulary, start: int) -> None:
    types = {
        "normal": gguf.TokenType.NORMAL,
        "unknown": gguf.TokenType.UNKNOWN,
        "control": gguf.TokenType.CONTROL,
        "named": gguf.TokenType.USER_DEFINED,
        "unused": gguf.TokenType.UNUSED,
        "byte": gguf.TokenType.BYTE,
    }
    is_bpe = vocabulary.model == "BPE"
    writer.add_tokenizer_model("gpt2" if is_bpe else "t5")
    writer.add_tokenizer_pre("gpt-2" if is_bpe else "default")
    writer.add_token_list(vocabulary.texts)
    writer.add_token_types([types[piece.kind] for piece in vocabulary.pieces])
    if is_bpe:
        writer.add_token_merges(vocabulary.merges or [NO_MERGE])
    else:
        writer.add_token_scores([piece.score for piece in vocabulary.pieces])
        if vocabulary.charsmap:
            writer.add_precompiled_charsmap(vocabulary.charsmap)
    writer.add_add_space_prefix(vocabulary.adds_space)
    writer.add_remove_extra_whitespaces(vocabulary.collapses_spaces)
    writer.add_bos_token_id(start)
    writer.add_eos_token_id(vocabulary.eos_id)
    writer.add_pad_token_id(vocabulary.pad_id)
    if vocabulary.unk_id is not None:
        writer.add_unk_token_id(vocabulary.unk_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
