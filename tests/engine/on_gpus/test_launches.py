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

SHAPE = T5ModelConfig(vocab_size=320, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_decoder_layers=1, num_heads=4)
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


def test_several_processes_wait_as_often_as_one_and_sum_a_block_in_one_collective() -> None:
    tracer = traced(step("cuda", RAGGED, processes=2))
    assert tracer.waits.total() == 1
    groups = 2 * (1 + 1) + 1  # A block and a norm of each stack, and the shared weights.
    assert (
        tracer.kernels["c10d::allreduce_coalesced_"] == 2 * groups - 2
    )  # After the stacks there is one for the norms.
    assert not tracer.kernels["c10d::allreduce_"]


def launches_and_waits(work: TracedWork) -> tuple[int, int]:
    """Kernels of all layers, by those of one layer and of two; and waits."""
    tracers = []
    for layers in (1, 2):
        shape = replace(work.model, num_layers=layers, num_decoder_layers=layers)
        tracers.append(traced(replace(work, model=shape)))
    one, two = (tracer.launches for tracer in tracers)
    return one + (work.model.num_layers - 1) * (two - one), tracers[1].waits.total()


def test_a_step_whose_gradients_are_held_starts_few_kernels() -> None:
    shape = T5ModelConfig(**model_presets()["t5-small"])
    work = TracedWork(shape, "cuda", ((512, 114),) * 8, scores=MOST_SCORES, max_grad_norm=1.0)
    launches, waits = launches_and_waits(work)
    assert launches <= 880 and waits == 1


@pytest.mark.parametrize(
    ("lengths", "device", "dropout", "saved", "dtype", "scores"),
    [
        (EQUAL * 4, "cuda", 0.1, 0, "bfloat16", 1 << 26),
        (RAGGED * 4, "mps", 0.1, 2, "float32", 1 << 26),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "ultra", "dropout", "fp16", "ragged", "mps"])
def test_the_bars(name: str) -> None:
    work, most, most_waits = works()[name]
    launches, waits = launches_and_waits(work)
    assert launches <= most and waits <= most_waits
