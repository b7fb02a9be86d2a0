"""What writing answers takes, predicted and measured in a process of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memory.estimate.generation import AnswerBudget, Weights, Writing, predict_generation
from memory.monitor import HostAlone, Monitor
from memory.processes import Usage
from model.shapes import weight_counts
from settings.declared import T5ModelConfig
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


@pytest.mark.parametrize(
    "writing",
    [
        Writing(16, 512, 24),
        Writing(4, 64, 48, beams=4),
        pytest.param(Writing(1, 4096, 4), marks=pytest.mark.slow),
        pytest.param(Writing(2, 2048, 60, beams=64), marks=pytest.mark.slow),
        pytest.param(Writing(64, 128, 64, sampled=True), marks=pytest.mark.slow),
    ],
)
def test_prediction_holds_and_is_near(writing: Writing) -> None:
    check(SHAPE, writing)


def check(shape: T5ModelConfig, writing: Writing) -> None:
    words = (writing.rows, writing.source_tokens, writing.new_tokens, writing.beams, 1.0 if writing.sampled else 0.0)
    weights = Weights(weight_counts(SHAPE)["total"] * 4, False, "float32")
    base, taken = in_child(CHILD.replace("{shape}", repr(SHAPE.__dict__)), *words)
    predicted = sum(predict_generation(SHAPE, weights, writing, base).values()) - base
    told = f"{taken / MIB:.0f} MiB, predicted {predicted / MIB:.0f}"
    assert taken <= predicted < 1.6 * taken + 24 * MIB, told


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
