"""How does a T5 become ONNX files? `encoder_model.onnx` and `decoder_model.onnx`, under the names that Optimum reads.

The decoder takes the whole answer so far and gives the logits of every place. ONNX runtimes multiply no bf16 on CPUs, so the
weights are fp32, or fp16 that a runtime widens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from commands.exporting.onnx_graph import Graph, decoder, encoder
from model.t5 import T5
from settings.program import needs

ENCODER_FILE, DECODER_FILE = "encoder_model.onnx", "decoder_model.onnx"


def write_onnx(model: T5, folder: Path) -> Path:
    """Write both graphs and their weights into a folder; matrices in fp16 where the model's are, else in fp32.

    Returns:
        the decoder's file.
    Raises:
        UserError: the package onnx is missing.
    Memory: one tensor.
    """
    onnx, c = needs("onnx", "--format = onnx"), model.config
    dtype = torch.float16 if model.embedding.dtype == torch.float16 else torch.float32
    values = dict(model.named_parameters())
    graph = Graph(onnx, folder / ENCODER_FILE, dtype)
    encoder(graph, values, c)
    ids = (np.int64, ("batch", "sequence"))
    graph.save({"input_ids": ids, "attention_mask": ids}, {"last_hidden_state": ("batch", "sequence", c.d_model)})
    graph = Graph(onnx, folder / DECODER_FILE, dtype)
    decoder(graph, values, c)
    graph.save(
        {
            "encoder_attention_mask": ids,
            "input_ids": (np.int64, ("batch", "target")),
            "encoder_hidden_states": (np.float32, ("batch", "sequence", c.d_model)),
        },
        {"logits": ("batch", "target", c.vocab_size)},
    )
    return folder / DECODER_FILE
