"""How does a frozen matrix lie in one byte a weight?

Symmetric int8 with one scale a row, which is an output channel of a matrix and a token of a table: row i is scale_i times
whole numbers from -127 to 127. Nothing learns in int8: such weights are frozen, under adapters or for answering.
A product widens one matrix at a time to the dtype of the activations and applies the scales to the result, which is
smaller than the matrix. (torch's own int8 products, `_int_mm` and `_weight_int8pack_mm`, take ten times as long as this
on a CPU without VNNI.)

Shapes: n rows, m columns, N tokens.
Source: per-channel absmax quantization, Jacob et al. 2018 (arXiv 1712.05877); frozen under adapters: Dettmers et al. 2023
(arXiv 2305.14314).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = 127  # largest whole number; -128 stays unused, so that the scale is symmetric
CHUNK_ELEMENTS = 1 << 20  # of a table widened at a time


class Int8Weight(nn.Parameter):
    """A frozen matrix in int8.

    Args:
        values: (n, m) int8.
        scale: (n,) fp32, one a row.
    Memory: n m + 4 n bytes.
    """

    scale: Tensor

    def __new__(cls, values: Tensor, scale: Tensor) -> Int8Weight:
        made = super().__new__(cls, values, requires_grad=False)
        made.scale = scale
        return made


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to 255 levels between plus and minus its largest magnitude.

    Args:
        weight: (n, m), any float dtype.
    Returns:
        values (n, m) int8 and scale (n,) fp32; a row of zeros gets scale 0.
    Memory: one fp32 copy of `weight`; callers pass chunks of rows.
    """
    wide = weight.float()
    scale = wide.abs().amax(1) / LEVELS
    values = wide.div(scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).round_()
    return values.clamp_(-LEVELS, LEVELS).to(torch.int8), scale


def quantize(chunks: Iterator[Tensor], rows: int, columns: int, device: torch.device | str = "cpu") -> Int8Weight:
    """Make an int8 weight of a matrix that comes in chunks of whole rows. Memory: the int8 matrix and one chunk."""
    values = torch.empty(rows, columns, dtype=torch.int8, device=device)
    scale = torch.empty(rows, device=device)
    start = 0
    for chunk in chunks:
        part = slice(start, start + len(chunk))
        values[part], scale[part] = quantize_rows(chunk.to(device))
        start += len(chunk)
    return Int8Weight(values, scale)


def fill_int8(model: nn.Module, chunks: Callable[[str], Iterator[Tensor]], device: torch.device | str = "cpu") -> None:
    """Give a model made on the meta device its weights: matrices and tables in int8, norms and position bias in fp32.

    Args:
        chunks: name of a weight -> its rows, in pieces.
    Memory: the int8 model and one chunk.
    """
    for name in [name for name, _ in model.named_parameters()]:
        empty, (place, _, attribute) = model.get_parameter(name), name.rpartition(".")
        made: nn.Parameter
        if empty.dim() == 1 or name.endswith("bias.table"):
            made = nn.Parameter(torch.cat([chunk.float() for chunk in chunks(name)]).to(device), requires_grad=False)
        else:
            rows, columns = empty.shape
            made = quantize(chunks(name), rows, columns, device)
        setattr(model.get_submodule(place), attribute, made)


def quantize_model(model: nn.Module) -> None:
    """Turn the matrices and tables of a loaded model into int8, one by one. Memory: one int8 matrix beside the model."""

    def rows(name: str) -> Iterator[Tensor]:
        weight = model.get_parameter(name).detach()
        return iter(weight.split(max(1, CHUNK_ELEMENTS // weight[0].numel())))

    fill_int8(model, rows, next(model.parameters()).device)


def is_int8(weight: Tensor) -> bool:
    """Whether this is an `Int8Weight` that lies in int8 now; during a visit it may lie widened."""
    return weight.dtype == torch.int8


def scale_of(weight: Tensor) -> Tensor:
    """The scales (n,) of an int8 weight."""
    assert isinstance(weight, Int8Weight), "a tensor in int8 has no scales of its own"
    return weight.scale


def dequantize(weight: Tensor, dtype: torch.dtype, rows: slice | Tensor | None = None) -> Tensor:
    """Rows of a weight in a float dtype: (n, m) of all, or those asked for; a weight that is not int8 is only cast."""
    part = weight.detach() if rows is None else weight.detach()[rows]
    if not is_int8(weight):
        return part.to(dtype)
    scale = scale_of(weight) if rows is None else scale_of(weight)[rows]
    return part.to(dtype).mul_(scale.to(dtype).unsqueeze(-1))


def embed(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `ids` (N,) of a table (V, D) in `dtype`: (N, D). Differentiable where the table is trained."""
    return dequantize(table, dtype, ids) if is_int8(table) else F.embedding(ids, table).to(dtype)


def row_pieces(table: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A table (V, D) in pieces of rows, widened one at a time. Memory: CHUNK_ELEMENTS numbers."""
    rows = max(1, CHUNK_ELEMENTS // table.shape[1])
    for start in range(0, table.shape[0], rows):
        yield dequantize(table, dtype, slice(start, start + rows))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T: (N, m) -> (N, n), without a graph for W. Memory: int8 weights are widened, n m numbers of x's dtype."""
    if not is_int8(weight):
        return F.linear(x, weight)
    return F.linear(x, weight.detach().to(x.dtype)).mul_(scale_of(weight).to(x.dtype))


def product_back(grad: Tensor, weight: Tensor) -> Tensor:
    """grad W: (N, n) -> (N, m), the gradient of x in `product`. Memory: as `product`."""
    if not is_int8(weight):
        return grad @ weight
    return (grad * scale_of(weight).to(grad.dtype)) @ weight.detach().to(grad.dtype)
