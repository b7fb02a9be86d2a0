"""Calls of the compiled kernels with tensors.

`kernels()` and `kernels_for(...)` are what all of model and engine ask: the loaded library, or None where there is none
or where `use(False)` was said. Each method takes contiguous CPU tensors in fp32 or bf16 (`kernels_for` looks) and
computes in fp32 inside, whatever they hold. Results are the same bits with any number of threads.
Source: the operations are those of the torch code beside each call, which also computes where there are no kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_long, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from devices.base import is_host
from devices.kernels.build import library_here
from devices.sizes import INT4_GROUP

PARTS = 16  # As in pointwise.c, the sums of so many parts of the rows are formed apart.
DTYPES = (torch.float32, torch.bfloat16)
KINDS = (torch.float32, torch.bfloat16, torch.int8)  # Dtypes of a matrix, in the order of decoding.c.
WIDEST_VECTOR = 16  # numbers


def _fields(kind: type[Any], *names: str) -> list[tuple[str, type[Any]]]:
    """Members of a structure that are of one kind."""
    return [(name, kind) for name in names]


class _Rows(Structure):
    """As `Rows` in attention.c."""

    _fields_ = (
        *_fields(c_void_p, "q", "k", "v", "grad", "out", "dq", "dk", "dv", "bias", "dbias"),
        *_fields(c_void_p, "query_starts", "query_lengths", "key_starts", "key_lengths", "row_keys"),
        *_fields(c_int32, "is_bf16", "num_rows", "heads", "width", "distances", "longest", "parts"),
        *_fields(c_int32, "threshold", "is_backward", "threads"),
        *_fields(c_float, "scale"),
    )


class _Tile(Structure):
    """As `Tile` in attention.c."""

    _fields_ = (
        *_fields(c_void_p, "scores", "weights", "used", "dweights", "bias", "dbias", "row_key"),
        *_fields(c_int32, "is_bf16", "count", "heads", "first_head", "queries", "keys", "distances"),
        *_fields(c_int32, "start", "last_query", "threshold", "threads"),
        *_fields(c_float, "scale"),
    )


class Kernels:
    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        p = c_void_p
        n = c_long
        i = c_int
        f = c_float
        for name, arguments, result in (
            ("attend_rows", [POINTER(_Rows)], i),
            ("weigh_tile", [POINTER(_Tile)], i),
            ("weigh_tile_back", [POINTER(_Tile)], i),
            ("gather_heads", [p, p, p, i, i, i, i, i, i, i], None),
            ("rms_norm", [p, p, p, p, n, n, f, i, i, i], i),
            ("rms_norm_back", [p, p, p, p, p, p, n, n, i, i, i], i),
            ("drop_tokens", [p, p, p, p, c_uint64, n, n, i, f, i, i], i),
            ("round_weights", [p, p, n, c_uint64, n, i], None),
            ("square_sum", [p, n, i, i], c_double),
            ("adafactor_sums", [p, p, p, n, n, i, i], i),
            ("adafactor_norm", [p, p, p, n, n, i, i, POINTER(c_int)], c_double),
            ("chunk_loss", [p, p, p, p, n, n, f, f, i, i, i], i),
            ("few_rows", [p, p, p, n, n, n, i, i], None),
            ("unpack_rows", [p, p, n, n, n, n, n, i, i], None),
            ("pack_rows", [p, p, n, n, n, i], None),
            ("attend_newest", [p, p, p, p, p, p, i, i, i, i, i, i], i),
            ("adafactor_apply", [p, p, p, p, n, n, f, f, c_uint64, i, i, i], i),
        ):
            function = getattr(self.library, name)
            function.argtypes = arguments
            function.restype = result

    def _run(self, name: str, *arguments: Any) -> None:
        """Call a kernel: of tensors it gets the address, and last the number of threads."""
        _check(getattr(self.library, name)(*map(_plain, arguments), torch.get_num_threads()))

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """The norm of x (N, D) times weight (D), and the inverse root of each token (N), fp32."""
        y = torch.empty_like(x)
        inverse = x.new_empty(len(x), dtype=torch.float32)
        self._run("rms_norm", x, weight, y, inverse, *x.shape, epsilon, _is_bf16(x), _is_bf16(weight))
        return y, inverse

    def rms_norm_back(self, grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x (N, D) and, fp32, of weight (D)."""
        dx = torch.empty_like(x)
        parts = x.new_empty(PARTS, x.shape[1], dtype=torch.float32)
        self._run("rms_norm_back", grad, x, weight, inverse, dx, parts, *x.shape, _is_bf16(x), _is_bf16(weight))
        return dx, parts.sum(0)

    def drop_tokens(
        self, x: Tensor, keys: Tensor, rows: Tensor, positions: Tensor, site: int, threshold: int, scale: float
    ) -> None:
        """Drop numbers of x (N, width) in place, and scale the others.

        Args:
            keys: (B,) int64, of the rows. rows, positions: (N,) int64, each token's row and its position in it.
            site: what a row's key is moved on by at this point of the model.
        """
        self._run("drop_tokens", x, keys, rows, positions, site % 2**64, *x.shape, threshold, scale, _is_bf16(x))

    def round_weights(self, values: Tensor, weight: Tensor, key: int, first: int) -> None:
        """Write fp32 values into a bf16 weight, rounded by chance; `first`: place of the first in the whole weight."""
        self._run("round_weights", values, weight, values.numel(), key % 2**64, first)

    def square_sum(self, x: Tensor) -> float:
        return float(self.library.square_sum(x.data_ptr(), x.numel(), _is_bf16(x), torch.get_num_threads()))

    def adafactor_sums(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Of a gradient (n, m): the mean of squares of each row (n), and the sums of squares of each column (m),
        fp32.
        """
        n, m = grad.shape
        rows = grad.new_empty(n, dtype=torch.float32)
        columns = grad.new_empty(PARTS, m, dtype=torch.float32)
        self._run("adafactor_sums", grad, rows, columns, n, m, _is_bf16(grad))
        return rows, columns.sum(0)

    def adafactor_norm(self, grad: Tensor, rows: Tensor, columns: Tensor) -> float:
        """The sum over all i, j of grad_ij^2 columns_j rows_i^2; rows (n), columns (m) fp32."""
        failed = c_int(0)
        total = self.library.adafactor_norm(
            grad.data_ptr(),
            rows.data_ptr(),
            columns.data_ptr(),
            *grad.shape,
            _is_bf16(grad),
            torch.get_num_threads(),
            ctypes.byref(failed),
        )
        _check(failed.value)
        return float(total)

    def adafactor_apply(
        self, weight: Tensor, grad: Tensor, rows: Tensor, columns: Tensor, keep: float, rate: float, key: int
    ) -> None:
        """weight (n, m) = keep weight - rate grad_ij rows_i columns_j; a bf16 weight is rounded by chance."""
        kinds = (_is_bf16(weight), _is_bf16(grad))
        self._run("adafactor_apply", weight, grad, rows, columns, *weight.shape, keep, rate, key % 2**64, *kinds)

    def chunk_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        smoothing: float,
        scale: float | None,
    ) -> Tensor:
        """The loss (C,) of each token, fp32; logits (C, V) become its gradient times `scale` where that is given.

        Args:
            labels: (C,) int64, below 0: no loss. weights: (C,) fp32, factor on each token's loss.
        Raises:
            IndexError: a label beyond the vocabulary, where the kernel would write.
        """
        if len(labels) and int(labels.max()) >= logits.shape[1]:
            raise IndexError(f"label {int(labels.max())} is out of bounds for {logits.shape[1]} words")
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        kinds = (scale is not None, _is_bf16(logits))
        self._run("chunk_loss", logits, labels, weights, losses, *logits.shape, smoothing, scale or 0.0, *kinds)
        return losses

    def few_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T of few rows: x (M, m) fp32, W (n, m) fp32, bf16 or int8 -> (M, n) fp32; see `takes_few`.

        A row's result is the same bits whatever rows are beside it.
        """
        y = x.new_empty(len(x), len(weight))
        self._run("few_rows", x, weight, y, len(x), *weight.shape, KINDS.index(weight.dtype))
        return y

    def pack(self, x: Tensor, packed: Tensor) -> None:
        """Round rows (n, m) in fp32 to int4; `packed` gets their bytes, see `model.int4` and `takes_packed`."""
        self._run("pack_rows", x.contiguous(), packed, *x.shape, packed.stride(0))

    def unpack(self, packed: Tensor, groups: int, first: int, width: int, dtype: torch.dtype) -> Tensor:
        """Numbers (n, width) of rows in int4, see `model.int4` and `takes_packed`.

        Args:
            packed: (n, bytes). groups: of a row. first: group that the numbers begin with.
        """
        numbers = torch.empty(len(packed), width, dtype=dtype)
        sizes = (len(packed), packed.stride(0), groups, first, width)
        self._run("unpack_rows", packed, numbers, *sizes, _is_bf16(numbers))
        return numbers

    def attend_newest(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        counts: NDArray[np.int64],
        bias: Tensor | None = None,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attention of one token a row: q (M, H, K) -> (M, H, K); K is one of KERNEL_WIDTHS.

        Args:
            keys, values: of all rows, padded (M, H, T, K) in q's dtype. counts: (M,), how many of them each token sees.
            bias: (H, T) fp32, the token itself last. new: keys and values of the tokens (M, H, K), which become the
                last of those seen.
        """
        out = torch.empty_like(q)
        rows, heads, width = q.shape
        visible = np.empty((rows, 4), np.int64)  # `Seen` in decoding.c
        for column, cache in enumerate((keys, values)):
            visible[:, column] = cache.data_ptr() + np.arange(rows) * (cache.stride(0) * cache.element_size())
        visible[:, 2] = counts
        visible[:, 3] = keys.stride(1) // width
        sizes = (rows, heads, width, 0 if bias is None else bias.shape[1])
        newest = new or (None, None)
        self._run("attend_newest", q, *newest, visible.ctypes.data, bias, out, _is_bf16(q), *sizes)
        return out

    def attend_rows(self, **fields: Any) -> None:
        """Attention of short rows; the fields of `Rows` in attention.c, but for `threads`."""
        _check(self.library.attend_rows(ctypes.byref(_filled(_Rows, fields))))

    def weigh_tile(self, is_backward: bool, **fields: Any) -> None:
        """What stands between the products of a tile; the fields of `Tile` in attention.c, but for `threads`."""
        weigh = self.library.weigh_tile_back if is_backward else self.library.weigh_tile
        _check(weigh(ctypes.byref(_filled(_Tile, fields))))

    def gather_heads(self, x: Tensor, tile: Tensor, tokens: Tensor, first_head: int = 0, is_back: bool = False) -> None:
        """From tokens (L) int32 of x (N, H, K) to tile (h, L, K), h of the heads from `first_head`; or back."""
        _, heads, width = x.shape
        size = x.element_size()
        address = x.data_ptr() + first_head * width * size
        self._run("gather_heads", address, tile, tokens, len(tokens), len(tile), heads, width, size, is_back)


def takes_few(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows` can multiply these: on a CPU, x in fp32, of a width that whole vectors make up."""
    return (
        x.is_cpu
        and weight.is_cpu
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.dtype == torch.float32
        and weight.dtype in KINDS
        and x.shape[1] % WIDEST_VECTOR == 0
    )


def takes_packed(packed: Tensor, width: int, dtype: torch.dtype) -> bool:
    """Whether `pack` and `unpack` know these bytes, and numbers of this dtype: on a CPU, rows of whole groups."""
    return is_host(packed) and packed.is_cpu and packed.stride(1) == 1 and dtype in DTYPES and width % INT4_GROUP == 0


_is_used = True


def use(is_used: bool) -> None:
    """Whether `kernels` gives any: what a run's plan has chosen."""
    global _is_used
    _is_used = is_used


def kernels() -> Kernels | None:
    """The kernels, where there are any and they are to be used."""
    return _loaded()[0] if _is_used else None


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """The same, where they can read these tensors."""
    is_read = all(is_host(t) and t.is_cpu and t.dtype in DTYPES and t.is_contiguous() for t in tensors)
    return kernels() if is_read else None


def why_none() -> str | None:
    """Why there are no kernels here; None where there are."""
    return _loaded()[1]


@lru_cache(maxsize=1)
def _loaded() -> tuple[Kernels | None, str | None]:
    path, reason = library_here()
    try:
        return (Kernels(str(path)), None) if path else (None, reason)
    except OSError as error:
        return None, str(error)


def _is_bf16(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _check(failed: int | None) -> None:
    if failed:
        raise MemoryError("a kernel found no memory for its scratch")


def _plain(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


def _filled(kind: type[Structure], fields: Mapping[str, Any]) -> Structure:
    return kind(**{name: _plain(value) for name, value in fields.items()}, threads=torch.get_num_threads())
