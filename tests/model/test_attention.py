from __future__ import annotations

import math
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import limits
from model.attention import attend
from model.dropout import _MIX_1, Dropout, mix, random_words
from model.rows import Rows
from tests.measuring import in_child

lengths = st.lists(st.integers(1, 13) | st.integers(1, 70), min_size=1, max_size=7)


def draw(
    seed: int,
    query_lengths: list[int],
    key_lengths: list[int],
    kind: str,
    rate: float = 0.0,
    heads: int = 2,
    width: int = 3,
):
    """Random arguments of `attend` in float64; kind: self, causal, cross or none (self without bias)."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    keys = torch.randint(-(2**62), 2**62, (len(query_lengths),), generator=generator)
    rows = Rows(tuple(query_lengths), keys), Rows(tuple(key_lengths), keys)
    q, k, v = (random(sum(n), heads, width) for n in (query_lengths, key_lengths, key_lengths))
    table = random(heads, 2 * max(*query_lengths, *key_lengths) + 3) if kind in ("self", "causal") else None
    bias = table
    if table is not None and kind == "causal":
        distances = torch.arange(table.shape[1]) - table.shape[1] // 2
        bias = table.masked_fill(distances > 0, -math.inf)
    return [q, k, v, table], bias, rows, kind == "causal", Dropout(rate, rows[0], site=3)


def kept_whole(dropout: Dropout, row: int, queries: int, keys: int, heads: int) -> Tensor:
    """(H, n, m): the mask as it is defined, a function of row, head, query and key."""
    places = torch.arange(heads)[:, None] * (1 << 32) + torch.arange(queries)
    return random_words(mix(dropout.row_keys()[row] + places * _MIX_1), keys) >= dropout.threshold


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], dropout: Dropout) -> Tensor:
    """The definition, under autograd: one full score matrix a row."""
    out = []
    queries, keys = rows
    for row, (n, m) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        i, j = queries.starts[row], keys.starts[row]
        scores = torch.einsum("ihk,jhk->hij", q[i : i + n], k[j : j + m])
        if bias is not None:
            scores = scores + bias[:, torch.arange(m) - torch.arange(n)[:, None] + bias.shape[1] // 2]
        weights = scores.softmax(-1)
        if dropout.active:
            weights = weights * kept_whole(dropout, row, n, m, q.shape[1]) * dropout.scale
        out.append(torch.einsum("hij,jhk->ihk", weights, v[j : j + m]))
    return torch.cat(out)


def gradients(out: Tensor, leaves: list[Tensor | None]) -> list[Tensor]:
    weights = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return list(
        torch.autograd.grad((out * weights).sum(), [leaf for leaf in leaves if leaf is not None], retain_graph=True)
    )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    query_lengths=lengths,
    kind=st.sampled_from(["self", "causal", "none", "cross"]),
    rate=st.sampled_from([0.0, 0.3]),
    tile=st.sampled_from([1, 40, 150, 10**6]),
    data=st.data(),
    seed=st.integers(0, 10**6),
)
def test_tiled_is_dense(
    query_lengths: list[int], kind: str, rate: float, tile: int, data: st.DataObject, seed: int
) -> None:
    count = len(query_lengths)
    key_lengths = (
        data.draw(st.lists(st.integers(1, 40), min_size=count, max_size=count)) if kind == "cross" else query_lengths
    )
    leaves, bias, rows, causal, dropout = draw(seed, query_lengths, key_lengths, kind, rate)
    expected = dense(*leaves[:3], bias, rows, dropout)
    with mock.patch.object(limits, "TILE_ELEMENTS", tile):
        out = attend(*leaves[:3], bias, rows, causal, dropout)
        found = gradients(out, leaves)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(found, gradients(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_memory_is_linear_in_length() -> None:
    short, long = in_child("""
import math
from model.attention import attend
from model.dropout import Dropout
from model.rows import Rows

def work(length):
    rows = Rows((length,))
    q, k, v = (torch.randn(length, 4, 16).requires_grad_() for _ in range(3))
    bias = torch.randn(4, 2 * length - 1).requires_grad_()
    attend(q, k, v, bias, (rows, rows), False, Dropout(0.0, rows)).sum().backward()

work(64)
print(measure(lambda: work(1024)), measure(lambda: work(4096)))
""")
    scores = 4 * 4096**2 * 4  # bytes of one full score matrix in fp32
    assert long < scores / 5
    assert long - short < scores / 10
