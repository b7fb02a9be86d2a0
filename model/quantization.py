"""Frozen matrices in one byte a weight, and products of narrow weights.

Symmetric int8 with one scale a row, which is an output channel of a matrix and a token of a table: row i is scale_i
times whole numbers from -127 to 127. Nothing learns in int8: such weights are frozen, under adapters or for answering.
A model in int4 has the matrices of its blocks in half of that (`model.int4`), its tables in int8: they lose more and
are few. A product widens one matrix at a time to the dtype of the activations and applies the scales of int8 to the
result, which is smaller than the matrix. (torch's own int8 products, `_int_mm` and `_weight_int8pack_mm`, take ten
times as long as this on a CPU without VNNI.)

Shapes: n rows, m columns, N tokens.
Source: per-channel absmax quantization, Jacob et al. 2018 (arXiv 1712.05877); frozen under adapters: Dettmers et al.
2023 (arXiv 2305.14314).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devices.base import traits_of
from devices.kernels.calls import kernels, takes_few
from devices.sizes import LEAST_WIDENED, WIDENED_ELEMENTS
from model.int4 import INT4, Int4Weight, empty_int4, pack_into, unpack
from model.shapes import is_block_matrix, is_matrix

ALL = slice(None)
QUANTIZED = (torch.int8, INT4)
LEVELS = 127  # The largest whole number; -128 stays unused, so that the scale is symmetric.


class Int8Weight(nn.Parameter):
    """A frozen matrix in int8.

    Args:
        values: (n, m) int8.
        scale: (n,) fp32, one a row.
    Memory: n m + 4 n bytes.
    """

    scale: Tensor

    def __new__(cls, values: Tensor, scale: Tensor) -> Int8Weight:
        weight = super().__new__(cls, values, requires_grad=False)
        weight.scale = scale
        return weight


def empty_int8(rows: int, columns: int, device: torch.device | str = "cpu") -> Int8Weight:
    """The memory of an int8 weight, for `quantize_into`."""
    values = torch.empty(rows, columns, dtype=torch.int8, device=device)
    return Int8Weight(values, torch.empty(rows, device=device))


def empty_quantized(
    name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Int8Weight | Int4Weight:
    """The memory of a matrix or table in a quantized model of this dtype."""
    empty = empty_int4 if dtype == INT4 and is_block_matrix(name, shape) else empty_int8
    rows, columns = shape
    return empty(rows, columns, device)


def quantize_into(weight: Int8Weight | Int4Weight, chunks: Iterable[Tensor], work: Tensor) -> None:
    """Round each row of a matrix: in int8 to 255 levels between plus and minus its largest magnitude.

    Args:
        weight: filled, on its device; a row of zeros gets scale 0.
        chunks: the matrix in whole rows, of any float dtype.
        work: fp32, on the same device; made as large as a chunk and overwritten.
    Memory: none but `work`.
    """
    start = 0
    for chunk in chunks:
        part = slice(start, start + len(chunk))
        start += len(chunk)
        if isinstance(weight, Int4Weight):
            pack_into(weight.data[part], chunk)
            continue
        chunk = chunk.to(weight.device)
        largest = torch.maximum(chunk.amax(1), -chunk.amin(1)).float()  # `abs` would make a copy of all.
        scale = torch.div(largest, LEVELS, out=weight.scale[part])
        work.resize_(chunk.shape).copy_(chunk)
        work.div_(scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).round_().clamp_(-LEVELS, LEVELS)
        weight.data[part].copy_(work)


def quantize(chunks: Iterable[Tensor], rows: int, columns: int, device: torch.device | str = "cpu") -> Int8Weight:
    """Make an int8 weight of a matrix that comes in chunks of whole rows. Memory: the int8 matrix and one chunk."""
    weight = empty_int8(rows, columns, device)
    quantize_into(weight, chunks, torch.empty(0, device=device))
    return weight


def fill_quantized(
    model: nn.Module,
    chunks: Mapping[str, Callable[[], Iterator[Tensor]]],
    dtype: torch.dtype,
    device: torch.device | str,
    filling: Callable[[nn.Parameter], AbstractContextManager[None]],
) -> None:
    """Give a model made on the meta device its weights: matrices and tables quantized, norms and position bias in fp32.

    Every matrix gets its memory before the first chunk is read, and all chunks are rounded in one place. Taken in
    turns, a matrix takes the memory that a chunk has freed, the next chunk finds none, and malloc ends up holding
    another model.

    Args:
        chunks: name of a weight -> its rows, in pieces; what is not named stays as it is. dtype: one of QUANTIZED.
        filling: a context in which a weight is in memory to be filled. Matrices that are quantized already have their
            place.
    Memory: the quantized model and one chunk.
    """
    for name, weight in list(model.named_parameters()):
        if is_matrix(name, weight.shape) and not isinstance(weight, Int8Weight | Int4Weight):
            replace_weight(model, name, empty_quantized(name, weight.shape, dtype, device))
    work = torch.empty(0, device=device)
    for name, read in chunks.items():
        weight = model.get_parameter(name)
        if isinstance(weight, Int8Weight | Int4Weight):
            with filling(weight):
                quantize_into(weight, read(), work)
        else:
            whole = torch.cat(list(read())).to(device, torch.float32)
            replace_weight(model, name, nn.Parameter(whole, requires_grad=False))


def quantize_model(model: nn.Module) -> None:
    """Turn the matrices and tables of a loaded model into int8, one by one. Memory: one int8 matrix beside the
    model.
    """
    for name, weight in list(model.named_parameters()):
        if is_matrix(name, weight.shape):
            rows, columns = weight.shape
            chunks = weight.detach().split(max(1, WIDENED_ELEMENTS // columns))
            replace_weight(model, name, quantize(chunks, rows, columns, weight.device))
        else:
            replace_weight(model, name, nn.Parameter(weight.detach().float(), requires_grad=False))


def replace_weight(model: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Put another weight in the place of the one of this name."""
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, weight)


def is_int8(weight: Tensor) -> bool:
    """Whether this is an `Int8Weight` that is in int8 now; while its block runs it may be widened."""
    return weight.dtype == torch.int8


def is_int4(weight: Tensor) -> bool:
    """Whether this is an `Int4Weight` that is in int4 now."""
    return weight.dtype == torch.uint8


def shape_of(weight: Tensor) -> tuple[int, int]:
    """Rows and columns of a matrix, whatever its tensor holds."""
    rows, columns = weight.shape
    return rows, weight.columns if isinstance(weight, Int4Weight) else columns


def scale_of(weight: Tensor) -> Tensor:
    """The scales (n,) of an int8 weight."""
    assert isinstance(weight, Int8Weight), "a tensor in int8 has no scales of its own"
    return weight.scale


def dequantize(weight: Tensor, dtype: torch.dtype, rows: slice | Tensor = ALL) -> Tensor:
    """Rows of a weight in a float dtype: (n, m) of all, or those asked for; a weight that is not quantized is only
    cast.
    """
    part = _widened(weight, dtype, rows)
    return part.mul_(scale_of(weight)[rows].to(dtype).unsqueeze(-1)) if is_int8(weight) else part


def _widened(weight: Tensor, dtype: torch.dtype, rows: slice | Tensor = ALL) -> Tensor:
    """Rows of a weight in a float dtype; those of int8 without their scales."""
    part = weight.detach()[rows]
    return unpack(part, shape_of(weight)[1], dtype) if is_int4(weight) else part.to(dtype)


# Rows that are trained in place of a frozen table's own: the number of the first, and (n, D) fp32.
TableRows = tuple[int, nn.Parameter]
_ROWS = "trained_rows"


def use_rows(table: nn.Parameter, rows: TableRows | None) -> None:
    """Let rows stand in place of those of a table in `embed`, `product` and `product_back`; None: its own."""
    setattr(table, _ROWS, rows)


def rows_of(table: Tensor) -> TableRows | None:
    """The rows that stand in place of those of a table, if any do."""
    return getattr(table, _ROWS, None)


def parts_of(table: nn.Parameter) -> list[nn.Parameter]:
    """A table, and the rows that stand in place of some of its own."""
    rows = rows_of(table)
    return [table] if rows is None else [table, rows[1]]


def embed(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `ids` (N,) of a table (V, D) in `dtype`: (N, D). Differentiable where the table is trained."""
    x = dequantize(table, dtype, ids) if is_int8(table) else F.embedding(ids, table).to(dtype)
    if (rows := rows_of(table)) is None:
        return x
    first, values = rows
    index = ids - first
    is_inside = (index >= 0) & (index < len(values))
    return torch.where(is_inside.unsqueeze(-1), F.embedding(index.clamp(0, len(values) - 1), values).to(dtype), x)


_few_rows = False


@contextmanager
def few_rows() -> Iterator[None]:
    """Until the context ends, products are of few rows, as when answers are written.

    Where there are compiled kernels, each weight is then read once, and a row's result is the same bits whatever rows
    are beside it. In training both would cost more than they give.
    """
    global _few_rows
    before = _few_rows
    _few_rows = True
    try:
        yield
    finally:
        _few_rows = before


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T: (N, m) -> (N, n), without a graph for W. Memory: weights of another dtype are widened, on a CPU in pieces.

    A piece stays in cache and in malloc's heap: a wide copy of all is written to memory that the system clears each
    time.
    """
    y = _product(x, weight)
    if (rows := rows_of(weight)) is not None:
        first, values = rows
        y[:, first : first + len(values)] = _product(x, values.to(x.dtype))
    return y


def _product(x: Tensor, weight: Tensor) -> Tensor:
    compiled = kernels() if _few_rows and takes_few(x, weight) else None
    if compiled is not None:
        y = compiled.few_rows(x, weight.detach())
    elif weight.dtype == x.dtype:
        return F.linear(x, weight)
    else:
        y = _widened_product(x, weight)
    return y.mul_(scale_of(weight).to(x.dtype)) if is_int8(weight) else y


def _widened_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, without the scales of int8, where W has another dtype."""
    pieces = _pieces(weight)
    if len(pieces) == 1:
        return _product(x, _widened(weight, x.dtype))
    y = x.new_empty(len(x), len(weight))
    for part in pieces:
        y[:, part] = _product(x, _widened(weight, x.dtype, part))
    return y


def product_back(grad: Tensor, weight: Tensor) -> Tensor:
    """grad W: (N, n) -> (N, m), the gradient of x in `product`. Memory: as `product`."""
    x = _product_back(grad, weight)
    if (rows := rows_of(weight)) is not None:
        first, values = rows
        part = slice(first, first + len(values))
        x.addmm_(grad[:, part], (values.detach() - dequantize(weight, torch.float32, part)).to(grad.dtype))
    return x


def _product_back(grad: Tensor, weight: Tensor) -> Tensor:
    is_one_product = len(weight) <= traits_of(grad.device).inner_chunk(len(weight))
    if weight.dtype == grad.dtype and is_one_product:
        return grad @ weight
    x = grad.new_zeros(len(grad), shape_of(weight)[1])
    for part in _pieces(weight):
        of_part = grad[:, part] * scale_of(weight)[part].to(grad.dtype) if is_int8(weight) else grad[:, part]
        x.addmm_(of_part, _widened(weight, grad.dtype, part))
    return x


def add_product(total: Tensor | None, first: Tensor, second: Tensor) -> Tensor:
    """first^T second: (N, n) and (N, m) -> (n, m), added to `total` in place where there is one."""
    step = traits_of(first.device).inner_chunk(len(first))
    for part, of_part in zip(first.split(step), second.split(step), strict=True):
        total = part.t() @ of_part if total is None else total.addmm_(part.t(), of_part)
    assert total is not None
    return total


def _pieces(weight: Tensor) -> list[slice]:
    """The rows of a matrix that a product widens at a time: all of them where there is no cache to stay in, but no more
    than the device adds up.
    """
    traits = traits_of(weight.device)
    widest = max(LEAST_WIDENED, WIDENED_ELEMENTS // shape_of(weight)[1])  # x is read, or added to, once a piece.
    rows = widest if traits.is_host else traits.inner_chunk(len(weight))
    return [slice(start, start + rows) for start in range(0, len(weight), rows)]
