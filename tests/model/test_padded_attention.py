"""The way of a GPU, on the CPU: does it attend as tiles do, with and without fused kernels, in one piece and in several?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.base import CUDA, HOST, MPS, DeviceTraits, override_traits
from limits import few_places, wide_groups
from model.attention import PositionBias, attend
from model.dropout import Dropout
from model.rows import Rows
from tests.engine.small_models import relative_error, small_model
from tests.model.test_attention import draw, gradients, lengths

FUSED = replace(CUDA, is_fused=True)
PLAIN = MPS


def with_filler(rows: Rows, filler: int) -> Rows:
    return Rows(rows.lengths, rows.keys, filler)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    query_lengths=lengths,
    kind=st.sampled_from(["self", "causal", "none", "cross"]),
    rate=st.sampled_from([0.0, 0.3]),
    scores=st.sampled_from([64, 3000, 10**6]),
    fillers=st.sampled_from([(0, 0), (5, 3)]),
    is_fused=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_padded_is_tiled(
    query_lengths: list[int], kind: str, rate: float, scores: int, fillers: tuple[int, int], is_fused: bool, seed: int
) -> None:
    key_lengths = [1 + n % 7 for n in query_lengths] if kind == "cross" else query_lengths
    leaves, bias, (queries, keys), causal, _ = draw(seed, query_lengths, key_lengths, kind, rate, width=8)
    if kind != "cross":
        fillers = fillers[0], fillers[0]
    leaves = [
        None if x is None else torch.cat([x.detach(), x.new_zeros(count, *x.shape[1:])]).requires_grad_()
        for x, count in zip(leaves[:3], (fillers[0], fillers[1], fillers[1]), strict=True)
    ]
    bias = None if bias is None else bias.detach().requires_grad_()
    leaves = [*leaves, bias]

    def run(way: DeviceTraits) -> list[Tensor]:
        with override_traits("cpu", way):
            rows = with_filler(queries, fillers[0]), with_filler(keys, fillers[1])
            out = attend(*leaves[:3], bias, rows, causal, Dropout(rate, rows[0], site=3))
            out = out[: queries.row_tokens]
            return [out, *gradients(out, leaves)]

    way = replace(FUSED if is_fused else PLAIN, scores=scores)
    for ours, theirs in zip(run(way), run(HOST), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(query_lengths=lengths, scores=st.sampled_from([1, 500, 10**4, 10**7]))
def test_each_row_is_in_one_group_and_the_scores_keep_to_their_size(query_lengths: list[int], scores: int) -> None:
    key_lengths = [1 + 3 * n % 40 for n in query_lengths]
    groups = list(wide_groups(query_lengths, key_lengths, 2, scores))
    assert sorted(row for group in groups for row in group.rows) == list(range(len(query_lengths)))
    for group in groups:
        assert group.num_keys >= max(key_lengths[row] for row in group.rows) and group.num_keys % 16 == 0
        assert group.num_queries >= max(query_lengths[row] for row in group.rows)
        assert group.places == few_places(len(group.rows)) >= len(group.rows)
        size = 2 * group.places * group.block * group.num_keys
        assert size <= scores or (group.places == 1 and group.block == 16)


@pytest.mark.parametrize("bidirectional", [False])
def test_the_bias_and_its_gradient_are_those_of_the_cpu(bidirectional: bool) -> None:
    module = PositionBias(small_model().config, bidirectional)
    torch.nn.init.normal_(module.table, generator=torch.Generator().manual_seed(0))
    found = []
    for way in (HOST, PLAIN):
        module.table.grad = None
        with override_traits("cpu", way):
            bias = module(30)
            bias[:, :30].backward(torch.linspace(-1, 1, bias[:, :30].numel()).view(-1, 30))
        found.append((bias.detach(), module.table.grad.clone()))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)


def test_bf16_is_near_fp32() -> None:
    leaves, bias, rows, causal, dropout = draw(5, [40, 33, 8], [40, 33, 8], "causal", width=8)
    table = bias.detach().requires_grad_()
    grad = torch.randn(81, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide = [*leaves[:3], table]
    expected = torch.autograd.grad(attend(*wide, rows, causal, dropout), wide, grad)
    narrow = [*(x.detach().bfloat16().requires_grad_() for x in leaves[:3]), table.detach().float().requires_grad_()]
    for way in (FUSED, PLAIN):
        with override_traits("cpu", way):
            found = torch.autograd.grad(attend(*narrow, rows, causal, dropout), narrow, grad.bfloat16())
        for ours, theirs in zip(found, expected, strict=True):
            assert relative_error(ours, theirs) < 0.03
