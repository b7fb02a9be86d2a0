"""How is a T5 written as ONNX operations? `Graph` gathers nodes and weights; `encoder` and `decoder` say what is computed.

Operations of opset 17 alone, so that old runtimes take it. Weights go one by one into a file beside the graph, which has no
limit of 2 GB. The bias of each distance is looked up in a table made here, so no logarithm is rounded differently elsewhere.

Shapes: B rows, S source, T target, D d_model, H heads, K d_kv, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config import T5ModelConfig
from model.attention import position_buckets
from model.shapes import DECODER, ENCODER, Stack

OPSET, IR_VERSION = 17, 8
MASKED = -1e9  # added to scores that must not be seen


class Graph:
    """One model file while it is written.

    Args:
        onnx: the package. path: of the file; weights go to `path` with `.data` behind it. dtype: of matrices in the file.
    """

    def __init__(self, onnx: ModuleType, path: Path, dtype: torch.dtype) -> None:
        self._onnx, self._path, self._dtype = onnx, path, dtype
        self._data = path.with_name(f"{path.name}.data").open("wb")
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add an operation; returns the name of its result."""
        name = output or f"{kind}_{len(self._nodes)}"
        self._nodes.append(
            self._onnx.helper.make_node(kind, list(inputs), [name], name=f"n{len(self._nodes)}", **attributes)
        )
        return name

    def number(self, values: Any, dtype: type = np.int64) -> str:
        name = f"c{len(self._constants)}"
        self._constants.append(self._onnx.numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def weight(self, name: str, values: Tensor) -> str:
        """Add a weight; those in fp16 stay so in a file of fp16, and are computed in fp32."""
        narrow = self._dtype == torch.float16 and values.dtype == torch.float16
        array = values.detach().to(torch.float16 if narrow else torch.float32).contiguous().numpy()
        proto = self._onnx.TensorProto(
            name=name, dims=array.shape, data_location=self._onnx.TensorProto.EXTERNAL,
            data_type=self._onnx.TensorProto.FLOAT16 if narrow else self._onnx.TensorProto.FLOAT,
        )  # fmt: skip
        facts = {"location": f"{self._path.name}.data", "offset": self._data.tell(), "length": array.nbytes}
        for key, value in facts.items():
            proto.external_data.add(key=key, value=str(value))
        array.tofile(self._data)
        self._constants.append(proto)
        return self.op("Cast", name, to=self._onnx.TensorProto.FLOAT) if narrow else name

    def save(self, inputs: Mapping[str, tuple[type, Sequence[Any]]], outputs: Mapping[str, Sequence[Any]]) -> None:
        """Write the file, check it by onnx's own rules, and close the weights.

        Args:
            inputs, outputs: name -> (dtype and) shape, names where a side may have any length.
        """
        self._data.close()
        helper = self._onnx.helper
        kinds: dict[Any, int] = {np.int64: self._onnx.TensorProto.INT64, np.float32: self._onnx.TensorProto.FLOAT}
        given = [helper.make_tensor_value_info(name, kinds[dtype], shape) for name, (dtype, shape) in inputs.items()]
        made = [helper.make_tensor_value_info(name, kinds[np.float32], shape) for name, shape in outputs.items()]
        graph = helper.make_graph(self._nodes, self._path.stem, given, made, self._constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="frugalt5")  # fmt: skip
        self._path.write_bytes(model.SerializeToString())
        self._onnx.checker.check_model(str(self._path))


def encoder(g: Graph, values: Mapping[str, Tensor], c: T5ModelConfig) -> None:
    """From `input_ids` and `attention_mask`, both (B, S), to `last_hidden_state` (B, S, D)."""
    x = g.op("Gather", g.weight("embedding", values["embedding"]), "input_ids")
    hidden = _masked(g, "attention_mask")
    distances = _distances(g, "input_ids")
    for number in range(c.num_layers):
        at = f"{ENCODER}.blocks.{number}."
        bias = g.op("Add", _bias(g, values, c, ENCODER, number, distances), hidden)
        x = _attend(g, values, c, f"{at}attention", x, bias)
        x = _feed_forward(g, values, c, at, x)
    _norm(g, values[f"{ENCODER}.final_norm.weight"], f"{ENCODER}.final_norm", c, x, "last_hidden_state")


def decoder(g: Graph, values: Mapping[str, Tensor], c: T5ModelConfig) -> None:
    """From `input_ids` (B, T), `encoder_hidden_states` (B, S, D) and `encoder_attention_mask` to `logits` (B, T, V)."""
    embedding = g.weight("embedding", values["embedding"])
    x = g.op("Gather", embedding, "input_ids")
    hidden = _masked(g, "encoder_attention_mask")
    distances = _distances(g, "input_ids")
    later = g.op("Greater", distances, g.number(0))
    unseen = g.op("Where", later, g.number(MASKED, np.float32), g.number(0, np.float32))
    for number in range(c.num_decoder_layers):
        at = f"{DECODER}.blocks.{number}."
        bias = g.op("Add", _bias(g, values, c, DECODER, number, distances), unseen)
        x = _attend(g, values, c, f"{at}attention", x, bias)
        x = _attend(g, values, c, f"{at}cross_attention", x, hidden, "encoder_hidden_states")
        x = _feed_forward(g, values, c, at, x)
    x = _norm(g, values[f"{DECODER}.final_norm.weight"], f"{DECODER}.final_norm", c, x)
    if c.scale_decoder_outputs:
        x = g.op("Mul", x, g.number(c.d_model**-0.5, np.float32))
    head = embedding if c.tie_word_embeddings else g.weight("head", values["head"])
    g.op("MatMul", x, g.op("Transpose", head, perm=[1, 0]), output="logits")


def _masked(g: Graph, mask: str) -> str:
    """(B, 1, 1, S): 0 where a token may be seen."""
    seen = g.op("Cast", g.op("Unsqueeze", mask, g.number([1, 2])), to=1)
    return g.op("Mul", g.op("Sub", g.number(1, np.float32), seen), g.number(MASKED, np.float32))


def _distances(g: Graph, ids: str) -> str:
    """(T, T): place of the key less that of the query."""
    length = g.op("Gather", g.op("Shape", ids), g.number(1))
    places = g.op("Range", g.number(0), length, g.number(1))
    return g.op("Sub", g.op("Unsqueeze", places, g.number([0])), g.op("Unsqueeze", places, g.number([1])))


def _bias(g: Graph, values: Mapping[str, Tensor], c: T5ModelConfig, stack: Stack, number: int, distances: str) -> str:
    """(1, H, T, T): what is added to the scores for their distance; the table of the stack, or of each block."""
    own = f"{stack}.blocks.{number}.bias.table"
    name, far = own if own in values else f"{stack}.bias.table", c.relative_attention_max_distance
    buckets = position_buckets(
        torch.arange(-far, far + 1),
        stack == ENCODER,
        c.relative_attention_num_buckets,
        c.relative_attention_max_distance,
    )
    table = g.weight(f"{stack}.{number}.bias", values[name].float()[buckets])
    near = g.op("Clip", distances, g.number(-far), g.number(far))
    found = g.op("Gather", table, g.op("Add", near, g.number(far)))
    return g.op("Unsqueeze", g.op("Transpose", found, perm=[2, 0, 1]), g.number([0]))


def _norm(g: Graph, weight: Tensor, name: str, c: T5ModelConfig, x: str, output: str = "") -> str:
    mean = g.op("ReduceMean", g.op("Mul", x, x), axes=[-1], keepdims=1)
    size = g.op("Sqrt", g.op("Add", mean, g.number(c.layer_norm_epsilon, np.float32)))
    return g.op("Mul", g.op("Div", x, size), g.weight(name, weight), output=output)


def _product(g: Graph, values: Mapping[str, Tensor], name: str, x: str) -> str:
    return g.op("MatMul", x, g.weight(name, values[f"{name}.weight"].t()))


def _attend(
    g: Graph, values: Mapping[str, Tensor], c: T5ModelConfig, at: str, x: str, bias: str, source: str = ""
) -> str:
    """One attention with its norm before and its sum behind; over `source`, or over itself."""
    normed = _norm(g, values[f"{at.replace('cross_attention', 'cross')}_norm.weight"], f"{at}_norm", c, x)
    split = g.number([0, 0, c.num_heads, c.d_kv])

    def heads(role: str, of: str, *order: int) -> str:
        return g.op("Transpose", g.op("Reshape", _product(g, values, f"{at}.{role}", of), split), perm=order)

    queries = heads("q", normed, 0, 2, 1, 3)
    keys, seen = heads("k", source or normed, 0, 2, 3, 1), heads("v", source or normed, 0, 2, 1, 3)
    shares = g.op("Softmax", g.op("Add", g.op("MatMul", queries, keys), bias), axis=-1)
    joined = g.op("Transpose", g.op("MatMul", shares, seen), perm=[0, 2, 1, 3])
    together = g.op("Reshape", joined, g.number([0, 0, c.num_heads * c.d_kv]))
    return g.op("Add", x, _product(g, values, f"{at}.o", together))


def _feed_forward(g: Graph, values: Mapping[str, Tensor], c: T5ModelConfig, at: str, x: str) -> str:
    normed = _norm(g, values[f"{at}feed_forward_norm.weight"], f"{at}feed_forward_norm", c, x)
    inner = _product(g, values, f"{at}feed_forward.wi", normed)
    if c.feed_forward_proj == "relu":
        inner = g.op("Relu", inner)
    else:
        gate = _product(g, values, f"{at}feed_forward.gate", normed)
        inner = g.op(
            "Mul",
            inner,
            _gelu(g, gate) if c.feed_forward_proj == "gated-gelu" else g.op("Mul", gate, g.op("Sigmoid", gate)),
        )
    return g.op("Add", x, _product(g, values, f"{at}feed_forward.wo", inner))


def _gelu(g: Graph, x: str) -> str:
    """GELU by tanh, as T5 1.1 has it."""
    cube = g.op("Mul", g.op("Mul", x, g.op("Mul", x, x)), g.number(0.044715, np.float32))
    bent = g.op("Tanh", g.op("Mul", g.op("Add", x, cube), g.number((2 / np.pi) ** 0.5, np.float32)))
    return g.op("Mul", g.op("Mul", x, g.number(0.5, np.float32)), g.op("Add", bent, g.number(1, np.float32)))
