"""A T5 as a file that llama.cpp runs: tensors under its names, sizes and tokenizer as metadata.

llama.cpp computes T5 1.1: it never scales the decoder's output. A T5 1.0 is scaled by d_model^-0.5, so its final norm
is written that much smaller, which is the same function. It knows ReLU and gated GELU, and distances up to 128. An
encoder alone is its architecture `t5encoder`, which gives embeddings: pooled as the file says, and of length 1.
Source: llama.cpp, conversion/t5.py, src/models/t5.cpp and t5encoder.cpp, src/llama-vocab.cpp; MODEL_ARCH.T5 of
gguf.constants.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from commands.exporting.exported import Comparison, Exported
from commands.exporting.vocabulary import Vocabulary
from model.shapes import Weight, weights
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.program import needs
from support.language import say
from support.units import MIB

CONTEXT_TOKENS = 512  # what llama.cpp assumes of a T5, which has no limit of its own
MAX_DISTANCE = 128  # beyond which llama.cpp has one bucket, whatever a file says
# llama.cpp loads no byte-level vocabulary without a merge: this one is of bytes 0xC0 and 0xC1, which UTF-8 never has
NO_MERGE = "\u00c0 \u00c1"
USE = 'llama-completion -m {file} -p "Your text" {decoding}'
ENCODER_USE = 'llama-embedding -m {file} -p "Your text"'
STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
QUANTIZED = {"int8": "Q8_0", "q4": "Q4_0"}
LIBRARY_BYTES = 16 * MIB  # Libraries that are loaded on the way, for the tokenizer and the card.
READ_PIECE_BYTES = 2500  # The package's reader holds each fact of each piece as an array of its own; measured.
BLOCK = 32  # numbers that share a scale
# What rounding changes at most, as a share of a tensor's largest number.
ROUNDING = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 5e-3, "Q4_0": 0.13}
POOLING = {"mean": "MEAN", "first": "CLS", "last": "LAST"}
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


def bytes_beside(shape: T5ModelConfig, precision: str) -> int:
    """Bytes that are held beside the model at the highest: while what was written is compared, the largest tensor as it
    is stored and three times in fp32, and what the package's reader makes of the vocabulary.
    """
    largest = max(weight.size for weight in weights(shape))
    return LIBRARY_BYTES + (2 + 3 * 4) * largest + READ_PIECE_BYTES * shape.vocab_size


def write(exported: Exported, folder: Path) -> Path:
    """Write `model-<type>.gguf` into a folder: matrices in the model's dtype or quantized, norms and bias
    tables in fp32.

    Returns:
        the file.
    Raises:
        UserError: the package gguf is missing, or llama.cpp has no such model.
    Memory: one tensor.
    """
    gguf = needs("gguf", "--format = gguf")
    config = exported.model.config
    refuse_unknown(config, exported.vocabulary)
    kind = _kind(exported)
    path = folder / f"model-{kind.lower()}.gguf"
    writer = gguf.GGUFWriter(str(path), "t5" if config.num_decoder_layers else "t5encoder")
    _describe(writer, gguf, config, exported.name, kind)
    _write_vocabulary(writer, gguf, exported.vocabulary)
    parameters = dict(exported.model.named_parameters())
    for weight in weights(config):
        tensor_type = gguf.GGMLQuantizationType[_type(weight, kind)]
        shape = gguf.quant_shape_to_byte_shape(weight.shape, tensor_type)
        dtype = np.dtype(np.uint8)  # The writer finds the shape again from bytes and their type.
        writer.add_tensor_info(gguf_name(weight), shape, dtype, math.prod(shape), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for weight in weights(config):
        values = _values(weight, parameters[weight.name], config)
        writer.write_tensor_data(gguf.quants.quantize(values, gguf.GGMLQuantizationType[_type(weight, kind)]))
    writer.close()
    return path


def check(exported: Exported, folder: Path) -> list[Comparison]:
    """Read the file back: every tensor is there under llama.cpp's name with its numbers, and so is every piece.

    Returns:
        nothing, as nothing here runs it.
    Raises:
        UserError: something is missing or differs, as after a disk that was full.
    Memory: one tensor as it is stored, and three times in fp32.
    """
    gguf = needs("gguf", "--format = gguf")
    config = exported.model.config
    (path,) = folder.glob("*.gguf")
    reader = gguf.GGUFReader(str(path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    parameters = dict(exported.model.named_parameters())
    expected = {gguf_name(weight): weight for weight in weights(config)}
    is_whole = tensors.keys() == expected.keys()
    is_whole &= len(reader.fields["tokenizer.ggml.tokens"].data) == len(exported.vocabulary.pieces)
    for name, weight in expected.items() if is_whole else ():
        values = _values(weight, parameters[weight.name], config)
        stored = tensors[name]
        # The reader's own array is mapped: what is unmapped between two samples of memory counts as held.
        data = np.fromfile(path, stored.data.dtype, stored.data.size, offset=stored.data_offset)
        numbers = gguf.quants.dequantize(data.reshape(stored.data.shape), stored.tensor_type)
        allowed = ROUNDING[_type(weight, _kind(exported))] * _largest(values)
        is_whole &= numbers.shape == values.shape and _largest(numbers - values) <= allowed
    if not is_whole:
        raise UserError("--output = {path}, does not hold what was written; check the disk", path=path)
    return []


def refuse_unknown(shape: T5ModelConfig, vocabulary: Vocabulary) -> None:
    """Raise a UserError where llama.cpp would compute something else than this model does."""
    problems: list[str] = []
    if shape.num_labels:
        text = "--model = an encoder with labels (--head={head}), llama.cpp runs encoders for embeddings alone"
        problems.append(say(text, head=shape.head))
    has_matrix = shape.gives_vectors and shape.embedding_size > 0
    if has_matrix:
        text = "--model = a dense layer after pooling (--embedding_size={size}), llama.cpp has none for T5 encoders"
        problems.append(say(text, size=shape.embedding_size))
    if shape.num_decoder_layers > shape.num_layers:
        text = (
            "--model = {num_decoder_layers} decoder and {num_layers} encoder layers, llama.cpp does not load more "
            "decoder than encoder layers"
        )
        problems.append(say(text, num_decoder_layers=shape.num_decoder_layers, num_layers=shape.num_layers))
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
        needs_onnx = shape.num_labels or has_matrix
        text = "{problem}; use --format=onnx" if needs_onnx else "{problem}; use --format=ctranslate2 or onnx"
        raise UserError(*(say(text, problem=problem) for problem in problems))


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


def _kind(exported: Exported) -> str:
    """The type of the matrices."""
    return QUANTIZED.get(exported.quantize) or STORED[exported.model.embedding.dtype]


def _type(weight: Weight, kind: str) -> str:
    """The type of a weight. In 4 bits, tables over the vocabulary would lose too much: they take 8."""
    if weight.role in ("norm", "bias table"):
        return "F32"
    if kind in QUANTIZED.values() and weight.shape[-1] % BLOCK:
        return "F16"
    if kind == "Q4_0" and weight.role in ("embedding", "head"):
        return "Q8_0"
    return kind


def _values(weight: Weight, parameter: torch.Tensor, shape: T5ModelConfig) -> np.ndarray[Any, Any]:
    """The numbers of a weight as llama.cpp needs them, in fp32."""
    values = parameter.detach().float()
    if weight.name == "decoder.final_norm.weight" and shape.scale_decoder_outputs:
        values = values * shape.d_model**-0.5
    return values.contiguous().numpy()


def _largest(values: np.ndarray[Any, Any]) -> float:
    """The largest magnitude. Memory: none, where `abs` would copy all."""
    return max(-float(values.min()), float(values.max()))


def _describe(writer: Any, gguf: ModuleType, c: T5ModelConfig, name: str, kind: str) -> None:
    writer.add_name(name)
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(c.d_model)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_block_count(c.num_layers)
    writer.add_head_count(c.num_heads)
    writer.add_key_length(c.d_kv)
    writer.add_value_length(c.d_kv)
    writer.add_layer_norm_eps(c.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(c.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(c.relative_attention_num_buckets)
    writer.add_vocab_size(c.vocab_size)
    if c.num_decoder_layers:
        writer.add_decoder_block_count(c.num_decoder_layers)
        writer.add_decoder_start_token_id(c.start_token_id)
        writer.add_bos_token_id(c.start_token_id)
    else:
        writer.add_pooling_type(gguf.PoolingType[POOLING[c.head_pooling]])
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])


def _write_vocabulary(writer: Any, gguf: ModuleType, vocabulary: Vocabulary) -> None:
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
    writer.add_eos_token_id(vocabulary.eos_id)
    writer.add_pad_token_id(vocabulary.pad_id)
    if vocabulary.unk_id is not None:
        writer.add_unk_token_id(vocabulary.unk_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
