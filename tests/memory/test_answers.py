"""How a model is held while it answers, and what writing takes, predicted and measured in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.units import MIB
from memory.answers import AnswerBatch, HeldModel, first_that_fits, rungs, storage_dtypes
from settings.declared import T5ModelConfig
from tests.measuring import in_child

SHAPE = T5ModelConfig(vocab_size=4096, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_decoder_layers=4, num_heads=8)
CHILD = """
from config import T5ModelConfig
from devices.malloc import tune_malloc
from model.decoding.generation import generate
from model.t5 import T5

rows, source, new, beams, temperature = (float(word) for word in sys.argv[1:6])
tune_malloc(sys.argv[6])

def write():
    model = T5(T5ModelConfig(**{shape})).initialise(0)
    ids = [[7] * (int(source) - 1) + [1]] * int(rows)
    length = dict(max_new_tokens=int(new), min_new_tokens=int(new))
    generate(model, ids, num_beams=int(beams), temperature=temperature, **length)
    return model

print(held("RssAnon"), measure(write))
"""


@pytest.mark.parametrize(
    "batch",
    [
        AnswerBatch(16, 512, 24),
        AnswerBatch(4, 64, 48, beams=4),
        pytest.param(AnswerBatch(1, 4096, 4), marks=pytest.mark.slow),
        pytest.param(AnswerBatch(2, 2048, 60, beams=64), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("malloc", ["fast", pytest.param("small", marks=pytest.mark.slow)])
def test_prediction_holds_and_is_near(batch: AnswerBatch, malloc: str) -> None:
    words = (batch.rows, batch.source_tokens, batch.new_tokens, batch.beams, 1.0 if batch.sampled else 0.0)
    base, measured = in_child(CHILD.replace("{shape}", repr(SHAPE.__dict__)), *words, malloc)
    model = HeldModel.of(SHAPE, "float32", "float32", base)
    model = replace(model, plan=replace(model.plan, malloc=malloc))
    predicted = sum(model.answering(batch).values()) - base
    sizes = f"{measured / MIB:.0f} MiB, predicted {predicted / MIB:.0f}"
    assert measured <= predicted < 1.6 * measured + 24 * MIB, sizes


def test_less_memory_means_narrower_weights_and_at_last_few_blocks_in_a_file() -> None:
    model = HeldModel.of(SHAPE, "float32", "float32", 100 * MIB)
    one = AnswerBatch(1, 64, 8)

    def rung(budget: int, requested: str = "auto", folders: tuple[str, ...] = ("device", "file")) -> Any:
        candidates = rungs(model, storage_dtypes("float32", "float32", requested), "float32", list(folders))
        chosen = first_that_fits(candidates, budget, lambda candidate: candidate.answering(one))
        return chosen and (chosen.plan.storage, chosen.plan.malloc, chosen.plan.offloaded_blocks)

    def needed(**plan: Any) -> int:
        return sum(replace(model, plan=replace(model.plan, **plan)).answering(one).values())

    whole = needed()
    assert rung(2 * whole) == ("float32", "fast", 0)
    assert rung(whole) == ("float32", "small", 0)
    assert rung(whole - 1) == ("bfloat16", "small", 0)
    assert rung(needed(storage="bfloat16") - 1) == ("int8", "small", 0)
    tight = needed(weights_in="file", offloaded_blocks=4)
    assert tight < whole
    assert rung(tight, "no") == ("float32", "small", 4)
    assert rung(whole, folders=("file",)) == ("float32", "small", 6)
    assert rung(100 * MIB) is None
