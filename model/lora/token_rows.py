"""Rows of the tables that learn beside adapters: those of added tokens, whose first values say little.

The tables stay frozen, in whatever they are stored. Rows of tokens FIRST to LAST stand in their place, in fp32: in
lookups, and in the products of the head, tied or not (`model.quantization`).
Source: PEFT's trainable tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from model.quantization import dequantize, use_rows
from model.t5 import T5


class TrainedTokenRows(nn.Module):
    """Rows of the embedding, and of a head of its own.

    Args:
        tokens: ids of the first and the last.
    Memory: 4 bytes a number.
    """

    def __init__(self, model: T5, tokens: tuple[int, int]) -> None:
        super().__init__()
        self.tokens = tokens
        rows = slice(tokens[0], tokens[1] + 1)
        self.embedding = nn.Parameter(dequantize(model.embedding, torch.float32, rows).clone())
        self.head = None if model.head is None else nn.Parameter(dequantize(model.head, torch.float32, rows).clone())

    def tables(self, model: T5) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each table of a model, and its rows here."""
        yield model.embedding, self.embedding
        if self.head is not None:
            yield model.output_weight, self.head


def use_token_rows(model: T5, rows: TrainedTokenRows | None) -> None:
    """Let these rows count in a model, and no others; None: those of its tables."""
    model.token_rows = rows
    for table in (model.embedding, model.output_weight):
        use_rows(table, None)
    if rows is not None:
        for table, values in rows.tables(model):
            use_rows(table, (rows.tokens[0], values))


@torch.no_grad()
def merge_token_rows(model: T5) -> None:
    """Write the rows into the tables, which may not be quantized."""
    rows = model.token_rows
    if rows is not None:
        for table, values in rows.tables(model):
            table[rows.tokens[0] : rows.tokens[1] + 1] = values.to(table.dtype)
        use_token_rows(model, None)
