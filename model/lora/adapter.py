"""LoRA: beside a frozen matrix W there are two thin ones: y = W x + s B A x.

A is drawn (Kaiming uniform) and B begins at zero, so that an adapted model begins as the base. s = alpha / rank.
Adapters are fp32 whatever the base is. An adapter sits on its `Linear`, so the engine loads, updates and hands over its
weights with its block.

Shapes: N tokens, n outputs, m inputs, r rank.
Source: Hu et al. 2021 (arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from model.dropout import Dropout
from model.layers import Linear, trained_product
from model.lora.form import LoraSettings, adapted_paths
from model.lora.token_rows import TrainedTokenRows, merge_token_rows, use_token_rows
from model.quantization import dequantize, shape_of
from model.t5 import T5


class LoraAdapter(nn.Module):
    """The thin matrices beside one `Linear`.

    Args:
        weight: (n, m), the frozen matrix, of which shape and device are read.
        seed: fixes A.
    Memory: r (n + m) fp32 numbers; running, N (r + n) more.
    """

    def __init__(self, weight: Tensor, settings: LoraSettings, seed: int) -> None:
        super().__init__()
        n, m = shape_of(weight)
        r = settings.rank
        self.scaling = settings.scaling
        bound = m**-0.5  # It is Kaiming uniform with a = sqrt(5), as PEFT draws it.
        drawn = torch.rand(r, m, generator=torch.Generator().manual_seed(seed % 2**63)).mul_(2 * bound).sub_(bound)
        self.a = nn.Parameter(drawn.to(weight.device))
        self.b = nn.Parameter(torch.zeros(n, r, device=weight.device))

    def forward(self, x: Tensor, y: Tensor, dropout: Dropout) -> Tensor:
        """x (N, m) and its product y (N, n) with the frozen matrix -> the adapted product (N, n)."""
        low = trained_product(dropout(x), self.a.to(x.dtype))  # (N, r)
        return torch.add(y, trained_product(low, self.b.to(x.dtype)), alpha=self.scaling)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """(n, m) fp32: the one matrix that does what `weight` and this adapter do. Memory: that matrix twice."""
        return torch.addmm(dequantize(weight, torch.float32), self.b, self.a, alpha=self.scaling)


def linears(model: T5) -> dict[str, Linear]:
    """Path -> every matrix that can be adapted, e.g. `encoder.blocks.0.attention.q`."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Linear)}


def add_adapters(model: T5, settings: LoraSettings, seed: int = 0) -> dict[str, LoraAdapter]:
    """Freeze the whole model but its head over labels, and put an adapter on every targeted matrix, and rows of
    `settings.tokens` in place of those of the tables.

    Args:
        settings: `targets` must exist, see `form.resolve_targets`.
        seed: fixes the first values of all A.
    Returns:
        path of its matrix -> adapter.
    Raises:
        UserError: the rank is larger than the narrowest matrix.
    """
    matrices = linears(model)
    model.requires_grad_(False)
    for head in filter(None, (model.label_head, model.embedding_head)):
        head.requires_grad_(True)
    adapters = {}
    for index, path in enumerate(adapted_paths(model.config, settings)):
        linear = matrices[path]
        linear.adapter = LoraAdapter(linear.weight, settings, seed * 1_000_003 + index)
        adapters[path] = linear.adapter
    model.adapter_dropout = settings.dropout
    if settings.tokens is not None:
        use_token_rows(model, TrainedTokenRows(model, settings.tokens))
    return adapters


def adapters_of(model: T5) -> dict[str, LoraAdapter]:
    """Path of its matrix -> adapter, of those that are on."""
    return {
        path.removesuffix(".adapter"): module
        for path, module in model.named_modules()
        if isinstance(module, LoraAdapter)
    }


def use_adapters(model: T5, adapters: Mapping[str, LoraAdapter], rows: TrainedTokenRows | None = None) -> None:
    """Let exactly these adapters be on, and the rows of tokens that learnt beside them; {}: the base alone."""
    for path, linear in linears(model).items():
        linear.adapter = adapters.get(path)
    use_token_rows(model, rows)


@contextmanager
def adapters_off(model: T5) -> Iterator[None]:
    """The base alone, until the context ends: the reference of preference training, without a second model."""
    adapters = adapters_of(model)
    rows = model.token_rows
    use_adapters(model, {})
    try:
        yield
    finally:
        use_adapters(model, adapters, rows)


@torch.no_grad()
def merge(model: T5) -> None:
    """Put every adapter into its matrix, in the matrix's dtype, and take it off. Memory: one matrix in fp32, twice.

    The base may not be quantized: a merged matrix needs its own rounding.
    """
    for path, adapter in adapters_of(model).items():
        weight = model.get_parameter(f"{path}.weight")
        assert weight.is_floating_point(), "merge into weights that are not quantized"
        weight.copy_(adapter.merged(weight))
    merge_token_rows(model)
    use_adapters(model, {})
    model.adapter_info = None
