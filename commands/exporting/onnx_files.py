"""A T5 as ONNX files: `encoder_model.onnx` and `decoder_model.onnx`, under the names that Optimum reads.

The graphs are those of `model.reference`, traced by torch's exporter; their weights go into a file beside each. The
decoder takes the whole answer so far and gives the logits of every place. ONNX runtimes multiply no bf16 on CPUs, so
the weights are fp32, or fp16 that a runtime widens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from commands.exporting.vocabulary import Vocabulary
from model.reference import T5Reference
from model.t5 import T5
from settings.program import needs

ENCODER_FILE = "encoder_model.onnx"
DECODER_FILE = "decoder_model.onnx"
OPSET = 17
# Sides of any length:
SOURCE = {0: "batch", 1: "sequence"}
TARGET = {0: "batch", 1: "target"}


class _Side(nn.Module):
    """One side of a model."""

    def __init__(self, model: T5Reference, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self.model, *inputs)


def write_onnx(model: T5, vocabulary: Vocabulary, folder: Path, name: str = "") -> Path:
    """Write both graphs and their weights into a folder; matrices in fp16 where the model's are, else in fp32.

    Returns:
        the decoder's file.
    Raises:
        UserError: the package onnx is missing.
    Memory: one tensor.
    """
    onnx = needs("onnx", "--format = onnx")
    with torch.device("meta"):
        reference = T5Reference(model.config).eval()
    reference.to_empty(device="cpu")  # a trace needs no values, and memory that nobody has written to takes none
    for number, parameter in enumerate(reference.parameters()):
        parameter.data.view(-1)[0] = number  # the exporter makes one of weights that are equal
    weights = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    ids = torch.ones(2, 3, dtype=torch.long)
    states = torch.zeros(2, 3, model.config.d_model)
    _write(
        onnx,
        _Side(reference, T5Reference.encode),
        weights,
        folder / ENCODER_FILE,
        (ids, ids),
        {"input_ids": SOURCE, "attention_mask": SOURCE, "last_hidden_state": SOURCE},
    )
    _write(
        onnx,
        _Side(reference, T5Reference.decode),
        weights,
        folder / DECODER_FILE,
        (ids[:, :2], states, ids),
        {"input_ids": TARGET, "encoder_hidden_states": SOURCE, "encoder_attention_mask": SOURCE, "logits": TARGET},
    )
    return folder / DECODER_FILE


def _write(
    onnx: ModuleType,
    side: nn.Module,
    weights: Mapping[str, Tensor],
    path: Path,
    example: tuple[Tensor, ...],
    axes: Mapping[str, Mapping[int, str]],
) -> None:
    """Trace one side into a file, and put its weights into `path` with `.data` behind it.

    Args:
        axes: sides of any length, of each input and behind them of the output, by name.
    """
    *inputs, output = axes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter by tracing needs no further package; the newer one does
        torch.onnx.export(
            side,
            example,
            str(path),
            input_names=inputs,
            output_names=[output],
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
            export_params=False,
            do_constant_folding=False,
        )
    graph = onnx.load(str(path))
    kinds = onnx.TensorProto
    with path.with_name(f"{path.name}.data").open("wb") as file:
        for value in [value for value in graph.graph.input if value.name in weights]:
            graph.graph.input.remove(value)
            name = value.name
            weight = weights[name]
            if weight.dtype == torch.float16:
                name += ".fp16"
                graph.graph.node.insert(0, onnx.helper.make_node("Cast", [name], [value.name], to=kinds.FLOAT))
            else:
                weight = weight.float()
            array = weight.contiguous().numpy()
            kind = kinds.FLOAT16 if weight.dtype == torch.float16 else kinds.FLOAT
            proto = graph.graph.initializer.add(
                name=name, dims=array.shape, data_type=kind, data_location=kinds.EXTERNAL
            )
            for key, fact in {"location": f"{path.name}.data", "offset": file.tell(), "length": array.nbytes}.items():
                proto.external_data.add(key=key, value=str(fact))
            array.tofile(file)
    path.write_bytes(graph.SerializeToString())
    onnx.checker.check_model(str(path))
