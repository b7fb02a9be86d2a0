"""A step as a GPU would be told it, traced without one: how much is started, waited for and held does not grow with
rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from benchmarks.checks.launches import works
from benchmarks.traced.traced_step import TracedWork, planned_bytes, trace
from devices.sizes import MOST_SCORES
from settings.declared import T5ModelConfig
from settings.optimizers import OPTIMIZERS
from settings.precedence import model_presets

SHAPE = T5ModelConfig(vocab_size=320, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4)
WIDE = T5ModelConfig(vocab_size=512, d_model=256, d_kv=32, d_ff=1024, num_layers=2, num_decoder_layers=2, num_heads=8)
EQUAL = ((64, 32),) * 32
RAGGED = tuple((20 + 7 * n % 200, 5 + 3 * n % 40) for n in range(32))
CHUNK = 1 << 28  # The whole loss is formed in one piece, because its pieces grow with the tokens.
traced = lru_cache(trace)  # Several tests compare with the same work.


def step(device: str, lengths: tuple[tuple[int, int], ...], **more: object) -> TracedWork:
    return TracedWork(SHAPE, device, lengths, chunk_bytes=CHUNK, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "lengths", "dropout"), [("cuda", RAGGED, 0.1), ("mps", EQUAL, 0.0)])
def test_twice_the_rows_start_as_many_kernels(
    device: str, lengths: tuple[tuple[int, int], ...], dropout: float
) -> None:
    one, two = (traced(step(device, lengths * times, dropout=dropout)) for times in (1, 2))
    sums = 12  # a level more of the sums of tokens' gradients, and a slab more of them
    assert abs(two.launches - one.launches) <= 2 * sums
    assert two.waits.total() == one.waits.total() == (1 if device == "cuda" else 2)
    assert one.uploads.total() == 1, "all indices and keys of a pass"
    assert two.peak_bytes < 2.1 * one.peak_bytes and two.moved_bytes < 2.1 * one.moved_bytes


def test_indices_of_groups_of_several_lengths_are_sent_together() -> None:
    assert traced(step("cuda", RAGGED, dropout=0.1, scores=1 << 20)).uploads.total() == 1


def test_several_processes_wait_as_often_as_one_and_sum_a_block_in_one_collective() -> None:
    tracer = traced(step("cuda", RAGGED, processes=2))
    assert tracer.waits.total() == 1
    groups = 2 * (2 + 1) + 1  # Two blocks and a norm of each stack, and the shared weights.
    assert (
        tracer.kernels["c10d::allreduce_coalesced_"] == 2 * groups - 2
    )  # After the stacks there is one for the norms.
    assert not tracer.kernels["c10d::allreduce_"]


@pytest.mark.parametrize(("optimizer", "max_grad_norm"), [("adamw_8bit", 0.0), ("muon", 0.0), ("adafactor", 0.5)])
def test_updates_are_made_together_and_nobody_waits_for_them(optimizer: str, max_grad_norm: float) -> None:
    """Four blocks of some ten matrices each, embedding and vectors."""
    wide = replace(SHAPE, d_model=128, d_kv=32)  # whole blocks of the 8-bit state
    plain, tracer = (
        traced(TracedWork(wide, "cuda", RAGGED, chunk_bytes=CHUNK, optimizer=name, max_grad_norm=norm))
        for name, norm in (("adafactor", 0.0), (optimizer, max_grad_norm))
    )
    assert tracer.waits.total() == 1
    assert tracer.launches < plain.launches + (400 if max_grad_norm == 0 else 0)


def test_a_layer_starts_as_many_kernels_as_the_next() -> None:
    shapes = [replace(SHAPE, num_layers=count, num_decoder_layers=count) for count in (1, 2, 3)]
    tracers = [traced(TracedWork(shape, "cuda", RAGGED, chunk_bytes=CHUNK)) for shape in shapes]
    counts = [tracer.launches for tracer in tracers]
    assert abs(counts[2] - 2 * counts[1] + counts[0]) <= 2
    assert counts[2] - counts[1] < 550
    # q, k and v are one product, k and v of the encoder's output another; with three matrices more in each block and
    # one across
    assert tracers[2].kernels["mm"] - tracers[1].kernels["mm"] == 3 * (1 + 3 + 1 + 3 + 3)


def launches_and_waits(work: TracedWork) -> tuple[int, int]:
    """Kernels of all layers, by those of one layer and of two; and waits."""
    tracers = []
    for layers in (1, 2):
        shape = replace(work.model, num_layers=layers, num_decoder_layers=layers)
        tracers.append(traced(replace(work, model=shape)))
    one, two = (tracer.launches for tracer in tracers)
    return one + (work.model.num_layers - 1) * (two - one), tracers[1].waits.total()


@pytest.mark.parametrize(("preset", "rows", "most"), [("t5-small", 8, 880), ("t5-base", 32, 1_600)])
def test_a_step_whose_gradients_are_held_starts_few_kernels(preset: str, rows: int, most: int) -> None:
    shape = T5ModelConfig(**model_presets()[preset])
    work = TracedWork(shape, "cuda", ((512, 114),) * rows, scores=MOST_SCORES, max_grad_norm=1.0)
    launches, waits = launches_and_waits(work)
    assert launches <= most and waits == 1


def test_fp16_starts_as_many_products_as_bf16() -> None:
    """There weights are stored in bf16: q, k and v are cast together, so that one product serves them."""
    narrow, wide = (traced(step("cuda", EQUAL, dtype=dtype)) for dtype in ("float16", "bfloat16"))
    assert narrow.kernels["mm"] == wide.kernels["mm"]


def test_rows_of_many_lengths_attend_in_one_kernel_a_group() -> None:
    tracer = traced(step("cuda", RAGGED, dropout=0.1))
    attentions = 2 * 1 + 2 * 2  # There are two blocks in each stack.
    groups = tracer.kernels["_efficient_attention_forward"] / attentions
    assert 2 <= groups <= 8 and groups == int(groups)
    assert tracer.kernels["_efficient_attention_backward"] == 2 * attentions * groups
    assert not tracer.kernels["bmm"] and not tracer.kernels["_softmax"]


@pytest.mark.parametrize(
    ("lengths", "device", "dropout", "saved", "dtype", "scores"),
    [
        (EQUAL * 4, "cuda", 0.1, 0, "bfloat16", 1 << 26),
        (((512, 32),) * 4, "cuda", 0.0, 0, "bfloat16", 1 << 26),
        (EQUAL * 4, "cuda", 0.0, 2, "float16", 1 << 26),
        (RAGGED * 4, "mps", 0.1, 2, "float32", 1 << 26),
        (RAGGED * 4, "cuda", 0.0, 4, "bfloat16", 1 << 26),
        (((2048, 64),) * 4, "cuda", 0.1, 0, "bfloat16", 1 << 22),  # A row in blocks of queries.
    ],
)
def test_the_plan_says_what_is_held(
    lengths: tuple[tuple[int, int], ...], device: str, dropout: float, saved: int, dtype: str, scores: int
) -> None:
    work = TracedWork(WIDE, device, lengths, dropout=dropout, saved=saved, dtype=dtype, scores=scores)
    assert 0.9 < planned_bytes(work) / traced(work).peak_bytes < 1.11


@pytest.mark.parametrize(("device", "optimizer"), [*(("cuda", name) for name in OPTIMIZERS), ("mps", "muon")])
def test_the_plan_covers_the_update_of_all_weights_together(device: str, optimizer: str) -> None:
    shape = replace(WIDE, vocab_size=8192, num_layers=3, num_decoder_layers=3)
    work = TracedWork(shape, device, ((8, 8),), optimizer=optimizer, scores=MOST_SCORES, max_grad_norm=1.0)
    assert 1.0 < planned_bytes(work) / traced(work).peak_bytes < 1.35


def test_gradients_that_are_held_take_the_place_of_activations() -> None:
    waiting, applied = (
        traced(TracedWork(WIDE, "cuda", EQUAL * 2, dropout=0.1, max_grad_norm=norm)).peak_bytes for norm in (1e9, 0.0)
    )
    assert waiting < 1.01 * applied


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "ultra", "dropout", "fp16", "ragged", "mps"])
def test_the_bars(name: str) -> None:
    work, most, most_waits = works()[name]
    launches, waits = launches_and_waits(work)
    assert launches <= most and waits <= most_waits
