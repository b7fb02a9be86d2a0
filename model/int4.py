"""Frozen matrices in four bits a weight.

A row is cut into groups of 64 numbers. Each number becomes one of sixteen levels times its group's scale. The levels
are those that lose least of normally distributed weights when a group is divided by its number of the largest
magnitude, with its sign: so one end of the levels is enough, 0 and 1 are among them, and the fifteenth level is not
spent on -1. The scale is then the one that fits best in squares. Of N(0, 1) this loses 8.5% in the root of the mean
square, where NF4 with absolute maxima loses 9.2% and whole numbers from -7 to 7 lose 10.8%, all at 4.25 bits.

Bytes of a row: 32 a group, of which byte i holds numbers i (low half) and i + 32, then two a group, its scale in bf16.
The levels are numbers of bf16 too, so a level times a scale is exact in fp32 and rounded once in bf16: the same bits
from torch, from compiled kernels and on a device.
Source: Dettmers et al. 2023 (arXiv 2305.14314), NF4; signed maxima and levels by Lloyd's algorithm: Blumenberg et al.
2025 (arXiv 2505.06653).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devices.kernels.calls import kernels, takes_packed
from devices.sizes import INT4_GROUP, INT4_GROUP_BYTES, PACKED_ELEMENTS

LEVELS = (
    -0.859375,
    -0.66796875,
    -0.5234375,
    -0.400390625,
    -0.291015625,
    -0.1904296875,
    -0.09423828125,
    0.0,
    0.087890625,
    0.177734375,
    0.271484375,
    0.373046875,
    0.486328125,
    0.6171875,
    0.77734375,
    1.0,
)
HALF = INT4_GROUP // 2
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # The plan's name for it; no tensor has this dtype.


class Int4Weight(nn.Parameter):
    """A frozen matrix (n, m) in int4; its tensor holds the bytes of its rows.

    Args:
        packed: uint8, the bytes of each row.
        columns: m.
    Memory: 34 bytes for 64 weights of a row.
    """

    columns: int

    def __new__(cls, packed: Tensor, columns: int) -> Int4Weight:
        weight = super().__new__(cls, packed, requires_grad=False)
        weight.columns = columns
        return weight


def empty_int4(rows: int, columns: int, device: torch.device | str = "cpu") -> Int4Weight:
    """The memory of an int4 weight, for `pack_into`."""
    return Int4Weight(
        torch.empty(rows, num_groups(columns) * INT4_GROUP_BYTES, dtype=torch.uint8, device=device), columns
    )


def num_groups(columns: int) -> int:
    """Groups of a row; the last may be filled up with zeros."""
    return -(-columns // INT4_GROUP)


def pack_into(packed: Tensor, chunk: Tensor) -> None:
    """Round rows (n, m) to levels on the host; `packed` gets their bytes. Memory: a few times PACKED_ELEMENTS
    numbers.
    """
    rows = max(1, PACKED_ELEMENTS // chunk.shape[1])
    for target, part in zip(packed.split(rows), chunk.split(rows), strict=True):
        host = torch.empty_like(target, device="cpu")
        _pack(host, part.float().cpu())
        target.copy_(host)


def _pack(packed: Tensor, x: Tensor) -> None:
    if (compiled := kernels()) is not None and takes_packed(packed, x.shape[1], x.dtype):
        return compiled.pack(x, packed)
    groups = num_groups(x.shape[1])
    x = F.pad(x, (0, groups * INT4_GROUP - x.shape[1])).view(len(x), groups, INT4_GROUP)
    high = x.amax(2, keepdim=True)
    low = x.amin(2, keepdim=True)
    largest = high.where(high >= -low, low)
    levels, borders = _levels(x.device)
    share = x / largest.where(largest != 0, 1)
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for border in borders:  # `bucketize` takes several times as long.
        codes += share > border
    used = levels.index_select(0, codes.flatten().int()).view(x.shape).double()
    # The largest number has level 1: the sum of squares is at least 1, but for a group of zeros.
    scales = torch.linalg.vecdot(x.double(), used) / torch.linalg.vecdot(used, used).clamp_(min=1)
    values, of_groups = _parts(packed, groups)
    torch.bitwise_or(codes[:, :, :HALF], codes[:, :, HALF:] << 4, out=values)
    of_groups.copy_(scales)


def unpack(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Bytes of rows -> the rows (n, m) in a float dtype.

    Memory: the result; without compiled kernels six more bytes a number.
    """
    groups = num_groups(columns)
    if (compiled := kernels()) is not None and takes_packed(packed, columns, dtype):
        return compiled.unpack(packed, groups, 0, columns, dtype)
    values, scales = _parts(packed, groups)
    words = _pairs(dtype, packed.device).index_select(0, values.flatten().int()).view(dtype)
    numbers = torch.empty(len(packed), groups, 2, HALF, dtype=dtype, device=packed.device)
    both = words.view(len(packed), groups, HALF, 2).transpose(2, 3)
    torch.mul(both, scales.to(dtype)[:, :, None, None], out=numbers)
    return numbers.view(len(packed), -1)[:, :columns]


def _parts(packed: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Views of the bytes of rows: two numbers a byte (n, groups, 32), and scales (n, groups) in bf16."""
    return packed[:, : groups * HALF].unflatten(1, (groups, HALF)), packed[:, groups * HALF :].view(torch.bfloat16)


@lru_cache(maxsize=8)
def _levels(device: torch.device) -> tuple[Tensor, Tensor]:
    """The levels, and the borders between them."""
    levels = torch.tensor(LEVELS, device=device)
    return levels, (levels[1:] + levels[:-1]) / 2


@lru_cache(maxsize=8)
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two levels that each byte stands for, as one whole number (256,)."""
    byte = torch.arange(256, device=device)
    levels = _levels(device)[0].to(dtype)
    both = torch.stack([levels[byte & 15], levels[byte >> 4]], 1)
    return both.view(torch.int64 if dtype == torch.float32 else torch.int32).flatten()
