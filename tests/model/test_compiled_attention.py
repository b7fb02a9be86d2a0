"""Compiled attention against the formula, in float64 and row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from devices import sizes
from devices.kernels import calls
from devices.pointwise import MIX_1, mix_by_torch, random_words
from model.attention import attend
from model.compiled_attention import CompiledAttention
from model.dropout import Dropout
from model.rows import Rows

pytestmark = pytest.mark.skipif(calls.kernels() is None, reason=f"no compiled kernels: {calls.why_none()}")
HEADS, WIDTH, FILLER = 3, 16, 5
LENGTHS = {
    "short": ([5, 9, 16, 1, 33], [5, 9, 16, 1, 33]),
    "across": ([5, 9, 1, 128], [7, 2, 30, 17]),
    "long and short": ([130, 5, 300], [130, 5, 300]),
    "across long ones": ([130, 5, 3], [4, 200, 600]),
}


def kept(dropout: Dropout, row: int, queries: int, keys: int) -> Tensor:
    """(H, L, M): what each weight is multiplied by."""
    if not dropout.active:
        return torch.ones(HEADS, queries, keys, dtype=torch.float64)
    counters = torch.arange(HEADS)[:, None] * (1 << 32) + torch.arange(queries)
    words = random_words(mix_by_torch(dropout.row_keys()[row] + counters * MIX_1), keys)
    return (words >= dropout.threshold).double() * dropout.scale


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], dropout: Dropout
) -> Tensor:
    outputs = []
    parts = zip(*(of.split(x) for of, x in zip((rows[0], rows[1], rows[1]), (q, k, v), strict=True)), strict=True)
    for row, (queries, keys, values) in enumerate(parts):
        scores = torch.einsum("lhk,mhk->hlm", queries, keys)
        if bias is not None:
            distances = torch.arange(len(keys)) - torch.arange(len(queries))[:, None]
            scores = scores + bias[:, distances + bias.shape[1] // 2]
        weights = scores.softmax(-1) * kept(dropout, row, len(queries), len(keys))
        outputs.append(torch.einsum("hlm,mhk->lhk", weights, values))
    return torch.cat([*outputs, q.new_zeros(rows[0].filler, HEADS, WIDTH)])


@pytest.mark.parametrize(
    ("name", "causal", "rate", "dtype", "tile"),
    [
        ("short", True, 0.2, torch.float32, sizes.TILE_ELEMENTS),
        ("across", False, 0.2, torch.bfloat16, sizes.TILE_ELEMENTS),
        # 2 of the 3 heads at a time, or queries in parts
        ("long and short", True, 0.2, torch.bfloat16, 2 * 128 * 384),
        ("across long ones", False, 0.0, torch.float32, 2 * 128 * 384),
    ],
)
def test_outputs_and_gradients_are_those_of_the_formula(
    name: str, causal: bool, rate: float, dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "TILE_ELEMENTS", tile)
    generator = torch.Generator().manual_seed(1)
    queries, keys = LENGTHS[name]
    is_across = queries != keys
    row_keys = torch.randint(-(2**62), 2**62, (len(queries),), generator=generator)
    rows = Rows(tuple(queries), row_keys, FILLER), Rows(tuple(keys), row_keys, FILLER)
    q, k, v = (
        torch.randn(of.num_tokens, HEADS, WIDTH, generator=generator).to(dtype) for of in (rows[0], *[rows[1]] * 2)
    )
    bias = torch.randn(HEADS, 2 * max(max(queries), max(keys)) - 1, generator=generator)
    if causal:
        bias[:, bias.shape[1] // 2 + 1 :] = -math.inf
    grad = torch.randn(q.shape, generator=generator).to(dtype)
    grad[rows[0].row_tokens :] = 0
    dropout = Dropout(rate, rows[0], site=7)
    ours = [x.clone().requires_grad_() for x in (q, k, v, *([] if is_across else [bias]))]
    peer = [x.double().requires_grad_() for x in (q, k, v, *([] if is_across else [bias]))]
    out = attend(*ours[:3], None if is_across else ours[3], rows, causal and not is_across, dropout)
    expected = by_formula(*peer[:3], None if is_across else peer[3], rows, dropout)
    assert type(out.grad_fn).__name__ == f"{CompiledAttention.__name__}Backward"
    out.backward(grad)
    expected.backward(grad.double())
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    for mine, its in zip([out, *(x.grad for x in ours)], [expected, *(x.grad for x in peer)], strict=True):
        assert (mine.double() - its).abs().max() <= tolerance * its.abs().max()
