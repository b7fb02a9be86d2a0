"""Copies of ONNX graphs in less precision: fp16 is written from the weights, int8 and q4 by onnxruntime's own tools."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from commands.exporting.onnx_store import MOST_INSIDE_BYTES
from settings.program import needs

BLOCK = 32  # Numbers that share a scale in q4.
# Bytes that a tool holds at the highest for each byte of the fp32 graph; measured, t5-base's width.
TOOL_SHARES = {"int8": 3.2, "q4": 3.2}


def need_packages(quantize: str) -> None:
    """Raises UserError where onnxruntime's tool for this precision misses a package."""
    if quantize == "q4":
        needs("onnx_ir", "--quantize = q4")


def halve(model: ModelProto, names: list[str]) -> set[str]:
    """Let a graph without weights multiply in fp16; norms, attention and sums stay fp32, and so do the products of the
    second feed-forward matrix, which overflow fp16 in T5. (onnxruntime's own converter gives two nodes one name here.)

    Returns:
        the names of the weights that are to be stored in fp16.
    """
    half = {name for name in names if name == "embedding" or name.endswith(".transposed")}
    nodes = list[NodeProto]()
    for node in model.graph.node:
        matrix = next(iter(half.intersection(node.input)), "")
        if ".wo." in matrix:
            nodes.append(_cast(matrix, f"{matrix}.wide", TensorProto.FLOAT))
            node.input[1] = f"{matrix}.wide"
            nodes.append(node)
        elif matrix:
            if node.op_type == "MatMul":
                nodes.append(_cast(node.input[0], f"{node.name}_half", TensorProto.FLOAT16))
                node.input[0] = f"{node.name}_half"
            output = node.output[0]
            node.output[0] = f"{node.name}_product"
            nodes += [node, _cast(node.output[0], output, TensorProto.FLOAT)]
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return half


def _cast(x: str, output: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [x], [output], name=f"cast_{output}", to=kind)


def quantize(path: Path, copy: Path, precision: str) -> bool:
    """Write an fp32 graph in int8 or q4.

    In int8, a matrix has a scale for each output, and activations are quantized as they come; a table of tokens has one
    scale for all of it, also where the same table gives the logits. In q4, each 32 numbers of a matrix have a scale,
    and tables of tokens are in int8.

    Returns:
        whether the weights of the copy lie beside it.
    Memory: the graph, as often as `TOOL_SHARES` says.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    is_beside = path.with_name(f"{path.name}_data").is_file()
    options: dict[str, Any] = {"weight_type": QuantType.QInt8, "use_external_data_format": is_beside}
    logging.disable(logging.WARNING)  # The tools tell each node, and advise fusions, which are none here.
    if precision == "int8":
        quantize_dynamic(path, copy, per_channel=True, reduce_range=True, **options)
    else:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantizer = MatMulNBitsQuantizer(onnx.load(str(path)), block_size=BLOCK, is_symmetric=True, accuracy_level=4)
        quantizer.process()
        quantize_dynamic(quantizer.model.model, copy, op_types_to_quantize=["Gather"], **options)
    logging.disable(logging.NOTSET)
    return is_beside and _gather(copy)


def _gather(copy: Path) -> bool:
    """Put weights that a tool has written beside a graph where transformers.js looks for them, or into the graph."""
    written = copy.with_name(f"{copy.name}.data")
    if written.stat().st_size <= MOST_INSIDE_BYTES:
        model = onnx.load(str(copy))
        written.unlink()
        onnx.save(model, str(copy))
        return False
    model = onnx.load(str(copy), load_external_data=False)
    data = copy.with_name(f"{copy.name}_data")
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = data.name
    written.rename(data)
    copy.write_bytes(model.SerializeToString())
    return True
