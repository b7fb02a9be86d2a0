"""Attention by torch's operations against its definition in float64; the bias; which rows go together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.base import CUDA, HOST, MPS, DeviceTraits, override_traits, placed_together
from devices.pointwise import MIX_1, mix_by_torch, random_words
from limits import few_places, row_groups
from model import padded_attention
from model.attention import PositionBias, attend
from model.dropout import Dropout
from model.rows import Rows
from tests.engine.small_models import relative_error, small_model
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
    return random_words(mix_by_torch(dropout.row_keys()[row] + places * MIX_1), keys) >= dropout.threshold


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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    query_lengths=lengths,
    kind=st.sampled_from(["self", "causal", "none", "cross"]),
    rate=st.sampled_from([0.0, 0.3]),
    traits=st.sampled_from([HOST, MPS]),
    scores=st.sampled_from([1, 64, 3000, 10**6]),
    fillers=st.sampled_from([(0, 0), (5, 3)]),
    seed=st.integers(0, 10**6),
)
def test_padded_is_dense(
    query_lengths: list[int], kind: str, rate: float, traits: DeviceTraits, scores: int, fillers: tuple[int, int], seed: int
) -> None:  # fmt: skip
    key_lengths = [1 + 3 * n % 40 for n in query_lengths] if kind == "cross" else query_lengths
    leaves, bias, (queries, keys), causal, dropout = draw(seed, query_lengths, key_lengths, kind, rate)
    expected = dense(*leaves[:3], bias, (queries, keys), dropout)
    of_queries, of_keys = fillers if kind == "cross" else (fillers[0], fillers[0])
    q, k, v = (
        torch.cat([x, x.new_full((count, *x.shape[1:]), 7.0)])
        for x, count in zip(leaves[:3], (of_queries, of_keys, of_keys), strict=True)
    )
    rows = Rows(queries.lengths, queries.keys, of_queries), Rows(keys.lengths, keys.keys, of_keys)
    with override_traits("cpu", replace(traits, scores=scores)):
        out = attend(q, k, v, bias, rows, causal, Dropout(rate, rows[0], site=3))[: queries.row_tokens]
        found = gradients(out, leaves)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(found, gradients(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def fused_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_: object, **__: object) -> tuple[Any, ...]:
    """What torch's fused kernel gives on a GPU, by products: output, and what its backward takes."""
    for x in (q, k, v, *([] if mask is None else [mask])):
        assert x.stride(-1) == 1 and all(step % 8 == 0 for step in x.stride()[:-1]), "a GPU would refuse it"
    scores = torch.einsum("blhk,bmhk->bhlm", q, k)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return torch.einsum("bhlm,bmhk->blhk", weights, v), weights, None, None


def fused_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> tuple[Tensor, ...]:
    weights = more[6]
    dscores = torch._softmax_backward_data(torch.einsum("blhk,bmhk->bhlm", grad, v), weights, -1, weights.dtype)
    found = [
        torch.einsum("bhlm,bmhk->blhk", dscores, k),
        torch.einsum("bhlm,blhk->bmhk", dscores, q),
        torch.einsum("bhlm,blhk->bmhk", weights, grad),
    ]
    if options["shared_storage_dqdkdv"]:
        assert q.shape == k.shape
        found = list(torch.stack(found, 2).unbind(2))
    return *(x if options["shared_storage_dqdkdv"] else x.contiguous() for x in found), dscores


@pytest.mark.parametrize("fused", ["both ways", "forward", "no way"])
@pytest.mark.parametrize("scores", [1000, 10**6])
@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
@pytest.mark.parametrize("lengths", [[16, 16, 16], [40, 33, 8]])
def test_heads_beside_each_other_are_those_of_several_tensors(
    lengths: list[int], kind: str, scores: int, fused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [n + 16 for n in lengths] if kind == "cross" else lengths
    leaves, bias, rows, _, dropout = draw(3, lengths, keys, kind, width=8)
    q, k, v = leaves[:3]
    expected = dense(q, k, v, bias, rows, dropout)
    if kind != "cross":
        rows = rows[0], rows[0]
    monkeypatch.setattr(padded_attention, "has_fused", lambda device: fused != "no way")
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", fused_forward)
    if fused == "both ways":
        monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", fused_backward)
    else:  # no row is long enough for it
        monkeypatch.setattr(padded_attention, "fuses_backward", lambda *_: False)
    packed = [q, torch.cat([k, v], 1)] if kind == "cross" else [torch.cat([q, k, v], 1)]
    with override_traits("cpu", replace(MPS, scores=scores)):
        out = padded_attention.PaddedAttention.apply(bias, rows, dropout, *packed)
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


@settings(max_examples=20, deadline=None, derandomize=True)
@given(query_lengths=lengths, scores=st.sampled_from([1, 500, 10**4, 10**7]))
def test_each_row_is_in_one_group_and_the_scores_keep_to_their_size(query_lengths: list[int], scores: int) -> None:
    key_lengths = [1 + 3 * n % 40 for n in query_lengths]
    groups = list(row_groups(query_lengths, key_lengths, 2, scores))
    assert sorted(row for group in groups for row in group.rows) == list(range(len(query_lengths)))
    for group in groups:
        assert group.num_keys >= max(key_lengths[row] for row in group.rows) and group.num_keys % 16 == 0
        assert group.num_queries >= max(query_lengths[row] for row in group.rows)
        assert group.places == few_places(len(group.rows)) >= len(group.rows)
        size = 2 * group.places * group.block * group.num_keys
        assert size <= scores or (group.places == 1 and group.block == 16)


def test_the_bias_and_its_gradient_on_a_gpu_are_those_of_the_cpu() -> None:
    module = PositionBias(small_model().config, bidirectional=False)
    torch.nn.init.normal_(module.table, generator=torch.Generator().manual_seed(0))
    found = []
    for way in (HOST, MPS):
        module.table.grad = None
        with override_traits("cpu", way):
            bias = module(30)
            bias[:, :30].backward(torch.linspace(-1, 1, bias[:, :30].numel()).view(-1, 30))
        found.append((bias.detach(), module.table.grad.clone()))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)


def test_the_fused_kernel_gets_a_bias_in_rows_whatever_the_order_of_strides_of_a_flip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flip, masks = Tensor.flip, list[Tensor]()
    # as CUDA lays out the flip of windows that overlap
    monkeypatch.setattr(Tensor, "flip", lambda x, *dims: flip(x, *dims).mT.contiguous().mT)
    fused = padded_attention._fused

    def seen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        masks.append(mask)
        return fused(q, k, v, mask)

    monkeypatch.setattr(padded_attention, "_fused", seen)
    q, bias, rows = torch.randn(64, 2, 8, device="meta"), torch.randn(2, 63, device="meta"), Rows((32, 32))
    with override_traits("meta", replace(CUDA, is_pinned=False)):
        attend(q, q, q, bias, (rows, rows), False, Dropout(0.0, rows))
    assert [mask.stride(-1) for mask in masks] == [1]


def test_buckets_that_a_failed_pass_has_not_sent_are_sent_again() -> None:
    module = PositionBias(small_model().config, bidirectional=False).to("meta")
    with override_traits("meta", MPS):
        with pytest.raises(MemoryError), placed_together():
            module.place_buckets(30)
            raise MemoryError
        assert module(30).shape[1] == 59


def test_bf16_is_near_fp32() -> None:
    leaves, bias, rows, causal, dropout = draw(5, [40, 33, 8], [40, 33, 8], "causal", width=8)
    table = bias.detach().requires_grad_()
    grad = torch.randn(81, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide = [*leaves[:3], table]
    expected = torch.autograd.grad(attend(*wide, rows, causal, dropout), wide, grad)
    narrow = [*(x.detach().bfloat16().requires_grad_() for x in leaves[:3]), table.detach().float().requires_grad_()]
    found = torch.autograd.grad(attend(*narrow, rows, causal, dropout), narrow, grad.bfloat16())
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 0.03
