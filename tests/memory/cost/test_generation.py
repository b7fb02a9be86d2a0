"""What writing answers takes, predicted and measured in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from config import T5ModelConfig
from memory.cost.generation import AnswerBudget, Weights, Writing, most_rows, predict_generation
from memory.observe.monitor import HostAlone, Monitor
from memory.observe.processes import Usage
from model.shapes import weight_counts
from tests.measuring import in_child
from units import MIB

SHAPE = T5ModelConfig(vocab_size=4096, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_decoder_layers=4, num_heads=8)
CHILD = """
from config import T5ModelConfig
from devices.malloc import tune_malloc
from model.decoding.generation import generate
from model.t5 import T5

rows, source, new, beams, temperature = (float(word) for word in sys.argv[1:])
tune_malloc("fast")

def write():
    model = T5(T5ModelConfig(**{shape})).initialise(0)
    ids = [[7] * (int(source) - 1) + [1]] * int(rows)
    generate(model, ids, max_new_tokens=int(new), min_new_tokens=int(new), num_beams=int(beams), temperature=temperature)
    return model

print(held("RssAnon"), measure(write))
"""


def weights(shape: T5ModelConfig = SHAPE) -> Weights:
    return Weights(weight_counts(shape)["total"] * 4, False, "float32")


@pytest.mark.parametrize(
    "writing",
    [
        Writing(24, 512, 64),
        pytest.param(Writing(1, 4096, 4), marks=pytest.mark.slow),
        Writing(8, 64, 96, beams=4),
        Writing(1, 1024, 24, beams=32),
        pytest.param(Writing(2, 2048, 60, beams=64), marks=pytest.mark.slow),
        pytest.param(Writing(64, 128, 64, sampled=True), marks=pytest.mark.slow),
        pytest.param(Writing(4, 64, 512, beams=8), marks=pytest.mark.slow),
    ],
)
def test_prediction_holds_and_is_near(writing: Writing) -> None:
    check(SHAPE, writing)


@pytest.mark.parametrize("writing", [Writing(1, 32, 4, beams=32), Writing(8, 32, 4, beams=4)], ids=str)
def test_beams_over_a_large_vocabulary(writing: Writing) -> None:
    check(replace(SHAPE, vocab_size=131072, d_model=16), writing)


def check(shape: T5ModelConfig, writing: Writing) -> None:
    words = (writing.rows, writing.source_tokens, writing.new_tokens, writing.beams, 1.0 if writing.sampled else 0.0)
    base, taken = in_child(CHILD.replace("{shape}", repr(shape.__dict__)), *words)
    predicted = sum(predict_generation(shape, weights(shape), writing, base).values()) - base
    told = f"{taken / MIB:.0f} MiB, predicted {predicted / MIB:.0f}"
    assert taken <= predicted < 1.6 * taken + 24 * MIB, told


def test_more_of_anything_takes_more() -> None:
    def total(writing: Writing) -> int:
        return sum(predict_generation(SHAPE, weights(), writing, 0).values())

    base = Writing(4, 512, 64)
    for larger in (Writing(8, 512, 64), Writing(4, 1024, 64), Writing(4, 512, 1280), Writing(4, 512, 64, beams=16)):
        assert total(larger) > total(base)
    # scores that tokens are drawn from are sorted, with their places
    assert total(Writing(64, 8, 8, sampled=True)) > total(Writing(64, 8, 8))
    # the source is held once for all beams: its keys and values are the same
    one, four = (predict_generation(SHAPE, weights(), Writing(4, 4096, 1, beams), 0) for beams in (1, 4))
    assert four["keys and values"] < 1.01 * one["keys and values"]


def test_what_is_measured_beyond_a_prediction_counts_for_the_next_batches() -> None:
    held = iter((100, 130, 130, 90, 90))
    processes = SimpleNamespace(usage=lambda: Usage(next(held, 90), 0))
    monitor = Monitor(200, HostAlone(), processes=processes)  # type: ignore[arg-type]
    kept = AnswerBudget(lambda writing: 60 + 10 * writing.rows, 200, monitor)
    eight = Writing(16, 8, 8)
    assert kept.most(eight) == 8
    with kept.measuring(Writing(4, 8, 8)):
        pass
    assert kept.excess_bytes == 30 and kept.most(eight) == 8  # 60 + 80 + 30 fits
    kept.excess_bytes = 70
    assert kept.most(eight) == 4
    kept.excess_bytes = 1000
    assert kept.most(eight) == 1  # begun is begun
    kept.total_bytes = 60
    assert kept.most(eight) == 0


def test_most_rows_is_the_largest_power_of_two_that_fits() -> None:
    for room, expected in ((0, 0), (1, 1), (3, 2), (40, 32), (1000, 64)):
        assert most_rows(lambda writing, room=room: writing.rows <= room, Writing(100, 8, 8)) == expected
    assert most_rows(lambda writing: True, Writing(5, 8, 8)) == 4
