"""An ONNX graph and the weights it refers to, written piece by piece: into one file, or the weights into one beside it.

The file is protobuf: each field begins with its number and length. The lengths follow from shapes, so nothing has to
be held to know them; `onnx.save` would hold all weights twice.
Source: onnx.proto (ModelProto.graph = 7, GraphProto.initializer = 5, TensorProto.raw_data = 9); the encoding of
protobuf.dev/programming-guides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from onnx import ModelProto, TensorProto
from torch import Tensor

from commands.exporting.onnx_graph import weight_of
from settings.declared import T5ModelConfig
from support.units import MIB

# Runtimes hold weights that lie inside a graph once more while they load it, and protobuf holds at most 2 GiB.
MOST_INSIDE_BYTES = 512 * MIB
PIECE_BYTES = 16 * MIB
# Numbers of the fields in onnx.proto.
_GRAPH = 7
_INITIALIZER = 5
_RAW_DATA = 9


def store(
    model: ModelProto,
    names: Sequence[str],
    weights: Mapping[str, Tensor],
    config: T5ModelConfig,
    path: Path,
    half: Collection[str] = (),
) -> bool:
    """Write a graph with its weights.

    Args:
        model: with its nodes, without weights. names: of the weights, as of `weight_of`.
        path: of the graph; weights that are too large for it lie in a file with `_data` behind its name.
        half: names of the weights that are written in fp16, the others are in fp32.
    Returns:
        whether the weights lie beside it.
    Memory: pieces of a tensor.
    """
    tensors = {name: weight_of(name, weights, config) for name in names}
    sizes = {name: tensor.numel() * (2 if name in half else 4) for name, tensor in tensors.items()}
    is_beside = sum(sizes.values()) > MOST_INSIDE_BYTES
    data_path = path.with_name(f"{path.name}_data")
    heads: dict[str, bytes] = {}
    offset = 0
    for name, tensor in tensors.items():
        proto = TensorProto(name=name, dims=tensor.shape)
        proto.data_type = TensorProto.FLOAT16 if name in half else TensorProto.FLOAT
        if is_beside:
            proto.data_location = TensorProto.EXTERNAL
            for key, fact in (("location", data_path.name), ("offset", offset), ("length", sizes[name])):
                proto.external_data.add(key=key, value=str(fact))
            offset += sizes[name]
            head = proto.SerializeToString()
            heads[name] = _field(_INITIALIZER, len(head)) + head
        else:
            head = proto.SerializeToString() + _field(_RAW_DATA, sizes[name])
            heads[name] = _field(_INITIALIZER, len(head) + sizes[name]) + head
    graph = model.graph.SerializeToString()
    about = ModelProto()
    about.CopyFrom(model)
    about.ClearField("graph")
    size = len(graph) + sum(map(len, heads.values())) + (0 if is_beside else sum(sizes.values()))
    with ExitStack() as stack:
        file = stack.enter_context(path.open("wb"))
        data = stack.enter_context(data_path.open("wb")) if is_beside else file
        file.write(about.SerializeToString() + _field(_GRAPH, size) + graph)
        for name, head in heads.items():
            file.write(head)
            for piece in _pieces(tensors[name], torch.float16 if name in half else torch.float32):
                data.write(piece.numpy().data)
    return is_beside


def _field(number: int, size: int) -> bytes:
    """The beginning of a field with so many bytes."""
    encoded = bytearray([number << 3 | 2])
    while size > 127:
        encoded.append(size & 127 | 128)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)


def _pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor in pieces of whole rows."""
    count = max(1, PIECE_BYTES // (4 * tensor[0].numel()))
    for rows in tensor.split(count):
        yield rows.to(dtype).contiguous()
