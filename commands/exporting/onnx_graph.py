"""The graphs of a T5 in ONNX's operations: an encoder, and a decoder that keeps keys and values between calls.

The decoder is one graph for the first token and for all later ones. `use_cache_branch` says which: where it is false,
keys and values of the encoder's output are computed; where it is true, those of the call before are used. Neither is
written as ONNX's `If`, whose subgraphs quantizers and GPU backends treat badly: each input is cut to no rows where it
is not used, and what is left is joined.

Names are those of Optimum's merged decoders, which transformers.js reads too. Weights are referred to by our names, and
stored as `onnx_store` decides.

Shapes: B rows, S source length, T new tokens, P tokens of earlier calls, D d_model, H heads, K d_kv.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from torch import Tensor

from model.attention import position_buckets
from model.shapes import EMBEDDING_HEAD
from settings.declared import T5ModelConfig

OPSET = 17
INT64, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL
SHORTEST = 1e-12  # Vectors are divided by no smaller length, as in torch.
LOWEST = -1.0e9  # Added to a score, it hides a key; infinity would make nan of a row that is all padding.


class Graph:
    """Nodes of a graph as they are added; each method returns the name of a value.

    Args:
        config: shape of the model.
    """

    def __init__(self, config: T5ModelConfig) -> None:
        self.config = config
        self.nodes = list[NodeProto]()
        self.weights = list[str]()
        self.constants = dict[str, np.ndarray[Any, Any]]()

    def add(self, operation: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node with one output."""
        output = name or f"{operation}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, list(inputs), [output], name=f"node_{output}", **attributes))
        return output

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """A number, or an array of them."""
        array = np.asarray(value, dtype)
        name = f"constant_{array.dtype}_{array.shape}_{array.tobytes().hex()[:64]}"
        self.constants[name] = array
        return name

    def weight(self, name: str) -> str:
        """A parameter of the model as it is."""
        if name not in self.weights:
            self.weights.append(name)
        return name

    def product(self, x: str, name: str) -> str:
        """x (..., I) times a matrix (O, I) of the model, which is stored transposed: (..., O)."""
        return self.add("MatMul", x, self.weight(f"{name}.transposed"))

    def affine(self, x: str, name: str) -> str:
        """x (..., I) through a linear layer with a bias: (..., O)."""
        return self.add("Add", self.product(x, f"{name}.weight"), self.weight(f"{name}.bias"))

    def length(self, x: str, axis: int) -> str:
        """The size of an axis, as an array of one number."""
        return self.add("Gather", self.add("Shape", x), self.constant([axis]))

    def norm(self, x: str, name: str) -> str:
        """T5's RMS norm of the last axis."""
        mean = self.add("ReduceMean", self.add("Mul", x, x), axes=[-1], keepdims=1)
        epsilon = self.constant(self.config.layer_norm_epsilon, np.float32)
        scale = self.add("Reciprocal", self.add("Sqrt", self.add("Add", mean, epsilon)))
        return self.add("Mul", self.add("Mul", x, scale), self.weight(f"{name}.weight"))

    def heads(self, x: str) -> str:
        """(B, L, H * K) -> (B, H, L, K)."""
        config = self.config
        split = self.add("Reshape", x, self.constant([0, 0, config.num_heads, config.d_kv]))
        return self.add("Transpose", split, perm=[0, 2, 1, 3])

    def attended(self, q: str, k: str, v: str, bias: str) -> str:
        """softmax(q k^T + bias) v of q (B, H, T, K), k and v (B, H, M, K): (B, T, H * K)."""
        scores = self.add("Add", self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2])), bias)
        values = self.add("MatMul", self.add("Softmax", scores, axis=-1), v)
        rows = self.add("Transpose", values, perm=[0, 2, 1, 3])
        return self.add("Reshape", rows, self.constant([0, 0, self.config.num_heads * self.config.d_kv]))

    def feed_forward(self, x: str, name: str) -> str:
        """wo(relu(wi(x))), or wo(act(gate(x)) * wi(x))."""
        inner = self.product(x, f"{name}.wi.weight")
        if self.config.feed_forward_proj == "relu":
            inner = self.add("Relu", inner)
        else:
            gate = self.product(x, f"{name}.gate.weight")
            is_gelu = self.config.feed_forward_proj == "gated-gelu"
            inner = self.add("Mul", self.gelu(gate) if is_gelu else self.silu(gate), inner)
        return self.product(inner, f"{name}.wo.weight")

    def gelu(self, x: str) -> str:
        """GELU with the tangent, as T5 1.1 has it: opset 17 knows none."""
        cube = self.add("Mul", self.add("Mul", x, x), x)
        curve = self.add("Add", x, self.add("Mul", cube, self.constant(0.044715, np.float32)))
        tangent = self.add("Tanh", self.add("Mul", curve, self.constant(math.sqrt(2 / math.pi), np.float32)))
        half = self.add("Mul", x, self.constant(0.5, np.float32))
        return self.add("Mul", half, self.add("Add", tangent, self.constant(1.0, np.float32)))

    def silu(self, x: str) -> str:
        """x times its logistic function."""
        return self.add("Mul", x, self.add("Sigmoid", x))

    def mask_bias(self, mask: str) -> str:
        """A mask (B, S) of ones and zeros as numbers to add to scores: (B, 1, 1, S)."""
        hidden = self.add("Sub", self.constant(1.0, np.float32), self.add("Cast", mask, to=FLOAT))
        bias = self.add("Mul", hidden, self.constant(LOWEST, np.float32))
        return self.add("Unsqueeze", bias, self.constant([1, 2]))

    def position_bias(self, table: str, queries: str, keys: str) -> str:
        """The learned numbers for distances: (1, H, T, M).

        Args:
            table: name of a bias table, which is stored by distance: (2 * max_distance + 1, H).
            queries, keys: positions, (T) and (M).
        """
        farthest = self.config.relative_attention_max_distance
        distances = self.add(
            "Sub", self.add("Unsqueeze", keys, self.constant([0])), self.add("Unsqueeze", queries, self.constant([1]))
        )
        limited = self.add("Clip", distances, self.constant(-farthest), self.constant(farthest))
        rows = self.add("Add", limited, self.constant(farthest))
        bias = self.add("Gather", self.weight(f"{table}.by_distance"), rows)
        return self.add("Unsqueeze", self.add("Transpose", bias, perm=[2, 0, 1]), self.constant([0]))

    def first(self, x: str, count: str, axis: int) -> str:
        """The first `count` (an array of one number) entries of an axis."""
        return self.add("Slice", x, self.constant([0]), count, self.constant([axis]))

    def positions(self, start: str, count: str) -> str:
        """start, start + 1, ...: (count)."""
        scalar = self.constant(np.zeros(0))
        begin = self.add("Reshape", start, scalar)
        end = self.add("Reshape", self.add("Add", start, count), scalar)
        return self.add("Range", begin, end, self.constant(1))

    def model(self, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]) -> ModelProto:
        """The graph with its constants, its weights left out."""
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "t5", list(inputs), list(outputs), constants)
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8, producer_name="frugalt5"
        )


def value(name: str, kind: int, *axes: str | int) -> ValueInfoProto:
    """An input or output, and the names of its axes."""
    return helper.make_tensor_value_info(name, kind, list(axes))


def encoder_states(graph: Graph) -> str:
    """`input_ids` and `attention_mask` (B, S) to hidden states (B, S, D)."""
    config = graph.config
    mask = graph.mask_bias("attention_mask")
    positions = graph.positions(graph.constant([0]), graph.length("input_ids", 1))
    x = graph.add("Gather", graph.weight("embedding"), "input_ids")
    shared = "" if config.bias_in_every_layer else graph.position_bias("encoder.bias.table", positions, positions)
    for number in range(config.num_layers):
        block = f"encoder.blocks.{number}"
        bias = shared or graph.position_bias(f"{block}.bias.table", positions, positions)
        normed = graph.norm(x, f"{block}.attention_norm")
        q, k, v = (graph.heads(graph.product(normed, f"{block}.attention.{side}.weight")) for side in "qkv")
        rows = graph.attended(q, k, v, graph.add("Add", bias, mask))
        x = graph.add("Add", x, graph.product(rows, f"{block}.attention.o.weight"))
        x = graph.add(
            "Add", x, graph.feed_forward(graph.norm(x, f"{block}.feed_forward_norm"), f"{block}.feed_forward")
        )
    return graph.norm(x, "encoder.final_norm")


def encoder_graph(config: T5ModelConfig) -> tuple[ModelProto, list[str]]:
    """`input_ids` and `attention_mask` (B, S) to `last_hidden_state` (B, S, D); and the weights it refers to."""
    graph = Graph(config)
    graph.add("Identity", encoder_states(graph), name="last_hidden_state")
    output = value("last_hidden_state", FLOAT, "batch_size", "encoder_sequence_length", config.d_model)
    return graph.model(_encoder_inputs(), [output]), graph.weights


def label_graph(config: T5ModelConfig) -> tuple[ModelProto, list[str]]:
    """An encoder with a head: `input_ids` and `attention_mask` (B, S) to `logits`, (B, L) of rows or (B, S, L) of
    tokens; and the weights it refers to.
    """
    graph = Graph(config)
    x = encoder_states(graph)
    axes: list[str | int] = ["batch_size", config.num_labels]
    if config.pools_rows:
        x = _pooled(graph, x)
    else:
        axes.insert(1, "encoder_sequence_length")
    if config.has_dense_head:
        x = graph.add("Tanh", graph.affine(x, "label_head.dense"))
    graph.add("Identity", graph.affine(x, "label_head.out"), name="logits")
    return graph.model(_encoder_inputs(), [value("logits", FLOAT, *axes)]), graph.weights


def vector_graph(config: T5ModelConfig) -> tuple[ModelProto, list[str]]:
    """An encoder with an embedding head: `input_ids` and `attention_mask` (B, S) to `last_hidden_state` (B, S, D) and
    `sentence_embedding` (B, V), as exports of sentence-transformers call them; and the weights it refers to.
    """
    graph = Graph(config)
    states = graph.add("Identity", encoder_states(graph), name="last_hidden_state")
    x = _pooled(graph, states)
    if config.embedding_size:
        x = graph.product(x, f"{EMBEDDING_HEAD}.dense.weight")
    if config.normalize:
        length = graph.add("ReduceL2", x, axes=[-1], keepdims=1)
        x = graph.add("Div", x, graph.add("Max", length, graph.constant(SHORTEST, np.float32)))
    graph.add("Identity", x, name="sentence_embedding")
    outputs = [
        value("last_hidden_state", FLOAT, "batch_size", "encoder_sequence_length", config.d_model),
        value("sentence_embedding", FLOAT, "batch_size", config.vector_size),
    ]
    return graph.model(_encoder_inputs(), outputs), graph.weights


def _pooled(graph: Graph, x: str) -> str:
    """Hidden states (B, S, D) of rows that begin at the left as one vector each: (B, D)."""
    mask = graph.add("Cast", "attention_mask", to=FLOAT)
    count = graph.add("ReduceSum", mask, graph.constant([1]), keepdims=1)
    if graph.config.head_pooling == "mean":
        shares = graph.add("Div", mask, count)
    else:
        positions = graph.positions(graph.constant([0]), graph.length("input_ids", 1))
        last = graph.add("Sub", count, graph.constant(1.0, np.float32))
        position = last if graph.config.head_pooling == "last" else graph.constant([[0.0]], np.float32)
        shares = graph.add("Cast", graph.add("Equal", graph.add("Cast", positions, to=FLOAT), position), to=FLOAT)
    weighted = graph.add("Mul", x, graph.add("Unsqueeze", shares, graph.constant([2])))
    return graph.add("ReduceSum", weighted, graph.constant([1]), keepdims=0)


def decoder_graph(config: T5ModelConfig) -> tuple[ModelProto, list[str]]:
    """The decoder with its cache; and the weights it refers to.

    Inputs: `input_ids` (B, T), `encoder_attention_mask` (B, S), `encoder_hidden_states` (B, S, D), `use_cache_branch`
    (1), and of each block `past_key_values.N.decoder.key` and `.value` (B, H, P, K), `.encoder.key` and `.value` (B, H,
    S, K). Outputs: `logits` (B, T, V), and `present.N...` in place of `past_key_values.N...`.
    """
    graph = Graph(config)
    is_cached = graph.add("Cast", "use_cache_branch", to=INT64)
    is_first = graph.add("Sub", graph.constant([1]), is_cached)
    cached = graph.add("Mul", graph.length("past_key_values.0.decoder.key", 2), is_cached)
    cached_source = graph.add("Mul", graph.length("past_key_values.0.encoder.key", 2), is_cached)
    new_source = graph.add("Mul", graph.length("encoder_hidden_states", 1), is_first)
    source = graph.first("encoder_hidden_states", new_source, 1)
    count = graph.length("input_ids", 1)
    queries = graph.positions(cached, count)
    keys = graph.positions(graph.constant([0]), graph.add("Add", cached, count))
    mask = graph.mask_bias("encoder_attention_mask")
    is_later = graph.add(
        "Greater",
        graph.add("Unsqueeze", keys, graph.constant([0])),
        graph.add("Unsqueeze", queries, graph.constant([1])),
    )
    future = graph.add("Mul", graph.add("Cast", is_later, to=FLOAT), graph.constant(LOWEST, np.float32))

    def sizes(length: str) -> str:
        ends = [graph.constant([config.num_heads]), length, graph.constant([config.d_kv])]
        return graph.add("Concat", graph.length("input_ids", 0), *ends, axis=0)

    own = cached, sizes(cached)
    across = cached_source, sizes(cached_source)

    def joined(past: str, used: tuple[str, str], new: str, name: str) -> str:
        # At the first token, when nothing of the past is used, Optimum gives vectors of d_model / num_heads numbers.
        vectors = graph.add("Reshape", graph.first(past, used[0], 2), used[1], allowzero=1)
        return graph.add("Concat", vectors, new, axis=2, name=name)

    # With tied weights the matrix of the head is the only copy, and a token is one of its columns.
    if config.tie_word_embeddings:
        columns = graph.add("Gather", graph.weight("embedding.transposed"), "input_ids", axis=1)
        x = graph.add("Transpose", columns, perm=[1, 2, 0])
    else:
        x = graph.add("Gather", graph.weight("embedding"), "input_ids")
    shared = ""
    if not config.bias_in_every_layer:
        shared = graph.add("Add", graph.position_bias("decoder.bias.table", queries, keys), future)
    for number in range(config.num_decoder_layers):
        block, past, present = f"decoder.blocks.{number}", f"past_key_values.{number}", f"present.{number}"
        bias = shared or graph.add("Add", graph.position_bias(f"{block}.bias.table", queries, keys), future)
        normed = graph.norm(x, f"{block}.attention_norm")
        q, k, v = (graph.heads(graph.product(normed, f"{block}.attention.{side}.weight")) for side in "qkv")
        k = joined(f"{past}.decoder.key", own, k, f"{present}.decoder.key")
        v = joined(f"{past}.decoder.value", own, v, f"{present}.decoder.value")
        x = graph.add("Add", x, graph.product(graph.attended(q, k, v, bias), f"{block}.attention.o.weight"))
        q = graph.heads(graph.product(graph.norm(x, f"{block}.cross_norm"), f"{block}.cross_attention.q.weight"))
        k, v = (graph.heads(graph.product(source, f"{block}.cross_attention.{side}.weight")) for side in "kv")
        k = joined(f"{past}.encoder.key", across, k, f"{present}.encoder.key")
        v = joined(f"{past}.encoder.value", across, v, f"{present}.encoder.value")
        x = graph.add("Add", x, graph.product(graph.attended(q, k, v, mask), f"{block}.cross_attention.o.weight"))
        x = graph.add(
            "Add", x, graph.feed_forward(graph.norm(x, f"{block}.feed_forward_norm"), f"{block}.feed_forward")
        )
    x = graph.norm(x, "decoder.final_norm")
    if config.scale_decoder_outputs:
        x = graph.add("Mul", x, graph.constant(config.d_model**-0.5, np.float32))
    head = "embedding" if config.tie_word_embeddings else "head"
    graph.nodes.append(
        helper.make_node("MatMul", [x, graph.weight(f"{head}.transposed")], ["logits"], name="node_logits")
    )
    return graph.model(_decoder_inputs(config), _decoder_outputs(config)), graph.weights


def _encoder_inputs() -> list[ValueInfoProto]:
    return [value(name, INT64, "batch_size", "encoder_sequence_length") for name in ("input_ids", "attention_mask")]


def _decoder_inputs(config: T5ModelConfig) -> list[ValueInfoProto]:
    source = "encoder_sequence_length"
    return [
        value("encoder_attention_mask", INT64, "batch_size", source),
        value("input_ids", INT64, "batch_size", "decoder_sequence_length"),
        value("encoder_hidden_states", FLOAT, "batch_size", source, config.d_model),
        *_cache(config, "past_key_values", "past_decoder_sequence_length", f"{source}_out", "head_size"),
        value("use_cache_branch", BOOL, 1),
    ]


def _decoder_outputs(config: T5ModelConfig) -> list[ValueInfoProto]:
    source = "encoder_sequence_length"
    logits = value("logits", FLOAT, "batch_size", "decoder_sequence_length", config.vocab_size)
    return [logits, *_cache(config, "present", "past_decoder_sequence_length + 1", f"{source}_out", config.d_kv)]


def _cache(config: T5ModelConfig, prefix: str, length: str, source: str, size: str | int) -> Iterable[ValueInfoProto]:
    for number in range(config.num_decoder_layers):
        for side, axis in (("decoder", length), ("encoder", source)):
            for part in ("key", "value"):
                name = f"{prefix}.{number}.{side}.{part}"
                yield value(name, FLOAT, "batch_size", config.num_heads, axis, size)


def weight_of(name: str, weights: Mapping[str, Tensor], config: T5ModelConfig) -> Tensor:
    """The numbers of a weight that a graph refers to: a parameter, its transpose, or a bias table by distance."""
    base, _, kind = name.rpartition(".")
    if kind == "transposed":
        return weights[base].T
    if kind == "by_distance":
        farthest = config.relative_attention_max_distance
        distances = torch.arange(-farthest, farthest + 1)
        is_encoder = base.startswith("encoder")
        return weights[base][position_buckets(distances, is_encoder, config.relative_attention_num_buckets, farthest)]
    return weights[name]
