"""Attention by torch's operations against its definition in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.base import CUDA, HOST, override_traits
from model.attention import attend
from model.dense_attention import BiasMatrix
from model.dropout import Dropout
from model.rows import Rows, dense_sides
from tests.engine.small_models import relative_error
from tests.measuring import in_child

lengths = st.lists(st.integers(1, 13) | st.integers(1, 70), min_size=1, max_size=7)
KINDS = ("self", "causal", "cross", "none")


def draw(
    kind: str, sources: list[int], answers: int = 1, seed: int = 0, width: int = 3, dense: bool = True
) -> tuple[list[Tensor], Tensor | None, tuple[Rows, Rows]]:
    """Queries, keys, values and the bias over distances as leaves in float64; the bias as attention reads it; the rows
    of both sides.
    """
    generator = torch.Generator().manual_seed(seed)
    targets = tuple(1 + (3 * n + 5 * answer) % 40 for answer in range(answers) for n in sources)
    keys = torch.randint(-(2**62), 2**62, (len(sources),), generator=generator)
    source, target = (
        dense_sides(tuple(sources), targets, keys) if dense else (Rows(tuple(sources), keys), Rows(targets))
    )
    rows = (target, source) if kind == "cross" else (source, source)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    leaves = [random(side.num_tokens, 2, width) for side in (rows[0], rows[1], rows[1])]
    if kind in ("cross", "none"):
        return leaves, None, rows
    table = random(2, 2 * source.longest - 1)
    bias = table
    if kind == "causal":
        distances = torch.arange(table.shape[1]) - table.shape[1] // 2
        bias = table.masked_fill(distances > 0, -math.inf)
    return [*leaves, table], bias, rows


def definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows]) -> list[Tensor]:
    """What each query row gives: one full score matrix."""
    queries, keys = (side.split for side in rows)
    out = []
    of_keys = list(zip(keys(k), keys(v), strict=True))
    for row, q_row in enumerate(queries(q)):
        k_row, v_row = of_keys[row % len(of_keys)]
        scores = torch.einsum("ihk,jhk->hij", q_row, k_row)
        if bias is not None:
            n = len(q_row)
            scores = scores + bias[:, torch.arange(n) - torch.arange(n)[:, None] + bias.shape[1] // 2]
        out.append(torch.einsum("hij,jhk->ihk", scores.softmax(-1), v_row))
    return out


def gradients(rows: tuple[Tensor, ...] | list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = torch.cat(list(rows))
    weights = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True))


def check(rows: tuple[Tensor, ...], expected: list[Tensor], leaves: list[Tensor]) -> None:
    torch.testing.assert_close(list(rows), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients(rows, leaves), gradients(expected, leaves), rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    sources=lengths,
    kind=st.sampled_from(KINDS),
    answers=st.sampled_from([1, 2]),
    dense=st.booleans(),
    is_matrix=st.booleans(),
    scores=st.sampled_from([1, 64, 3000, 10**6]),
    seed=st.integers(0, 10**6),
)
def test_dense_attention_is_its_definition(
    sources: list[int], kind: str, answers: int, dense: bool, is_matrix: bool, scores: int, seed: int
) -> None:
    leaves, bias, rows = draw(kind, sources, answers if dense else 1, seed, dense=dense)
    expected = definition(*leaves[:3], bias, rows)
    with override_traits("cpu", replace(HOST, score_elements=scores)):
        read = bias if bias is None or not is_matrix else BiasMatrix.apply(bias, rows[0].longest)
        out = attend(*leaves[:3], read, rows, kind == "causal", Dropout(0.0, rows[0]))
        check(rows[0].split(out), expected, leaves)


@pytest.mark.parametrize(("kind", "scores"), [("self", 64), ("cross", 10**6)])
def test_what_is_dropped_is_dropped_on_the_way_back(kind: str, scores: int) -> None:
    leaves, _, rows = draw(kind, [2, 5])

    def run(*inputs: Tensor) -> Tensor:
        out = attend(*inputs[:3], *(inputs[3:] or (None,)), rows, False, Dropout(0.3, rows[0], site=3))
        return torch.cat(rows[0].split(out))

    with override_traits("cpu", replace(HOST, score_elements=scores)):
        assert torch.autograd.gradcheck(run, leaves)
        plain = definition(*leaves[:3], None if len(leaves) == 3 else leaves[3], rows)
        assert relative_error(run(*leaves).detach(), torch.cat(plain).detach()) > 0.05


def fused_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_: object, **__: object) -> tuple[Any, ...]:
    """What torch's memory-efficient kernel gives on a GPU, by products: output, and what its backward takes."""
    for x in (q, k, v, *([] if mask is None else [mask])):
        assert x.stride(-1) == 1 and all(step % 8 == 0 for step in x.stride()[:-1]), "a GPU would refuse it"
    scores = torch.einsum("blhk,bmhk->bhlm", q, k)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return torch.einsum("bhlm,bmhk->blhk", weights, v), weights, torch.tensor(0), torch.tensor(0)


def fused_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> tuple[Tensor, ...]:
    out, weights = more[1], more[6]
    torch.testing.assert_close(out, torch.einsum("bhlm,bmhk->blhk", weights, v))
    dscores = torch._softmax_backward_data(torch.einsum("blhk,bmhk->bhlm", grad, v), weights, -1, weights.dtype)
    return (
        torch.einsum("bhlm,bmhk->blhk", dscores, k),
        torch.einsum("bhlm,blhk->bmhk", dscores, q),
        torch.einsum("bhlm,blhk->bmhk", weights, grad),
        dscores,
    )


@pytest.mark.parametrize(
    ("sources", "kind", "scores"), [([16, 16], "cross", 10**6), ([40, 8], "causal", 1000), ([40, 8], "self", 10**6)]
)
def test_the_fused_kernel_is_given_what_it_takes(
    sources: list[int], kind: str, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, bias, rows = draw(kind, sources, width=8)
    q, k, v = leaves[:3]
    expected = definition(q, k, v, bias, rows)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", fused_forward)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", fused_backward)
    with override_traits("cpu", replace(CUDA, score_elements=scores)):
        for is_matrix in (False, True):
            read = bias if bias is None or not is_matrix else BiasMatrix.apply(bias, rows[0].longest)
            out = attend(q, k, v, read, rows, kind == "causal", Dropout(0.0, rows[0]))
            check(rows[0].split(out), expected, leaves)


def test_memory_is_linear_in_length() -> None:
    short, long = in_child("""
import math
from model.attention import attend
from model.dropout import Dropout
from model.rows import one_padded_group

def work(length):
    rows = one_padded_group((length,))
    q, k, v = (torch.randn(length, 4, 16).requires_grad_() for _ in range(3))
    bias = torch.randn(4, 2 * length - 1).requires_grad_()
    attend(q, k, v, bias, (rows, rows), False, Dropout(0.0, rows)).sum().backward()

work(64)
print(measure(lambda: work(1024)), measure(lambda: work(4096)))
""")
    scores = 4 * 4096**2 * 4  # bytes of one full score matrix in fp32
    assert long < scores / 5
    assert long - short < scores / 10
