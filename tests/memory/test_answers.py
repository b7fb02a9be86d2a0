"""How a model is held while it answers, and what writing takes, predicted and measured in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memory.answers import (
    AnswerBatch,
    HeldModel,
    bytes_before,
    first_that_fits,
    largest,
    rows_to_measure,
    rungs,
    storage_dtypes,
)
from memory.budget import Budget
from memory.processes import ProcessTree
from settings.declared import GenerateConfig, T5ModelConfig
from settings.errors import DoesNotFit
from support.units import MIB
from tests.fake_device import FakeDevice
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


NARROW = {"storage": "int8", "compute": "bfloat16", "malloc": "fast"}
ON_GPU = {"storage": "bfloat16", "compute": "bfloat16", "scores": 1 << 16, "malloc": "untrimmed"}


@pytest.mark.parametrize(
    ("plan", "batch", "others", "size"),
    [
        ({}, AnswerBatch(16, 512, 24), {}, 329643151),
        ({}, AnswerBatch(16, 512, 24), {"rows_read": 3, "cached_tokens": 9000}, 274020126),
        ({}, AnswerBatch(64, 8, 300, choices=500), {}, 376142489),
        ({"storage": "bfloat16", "malloc": "fast"}, AnswerBatch(16, 512, 24), {}, 328053401),
        (NARROW, AnswerBatch(4, 64, 48, beams=4, sampled=True), {}, 183828485),
        (NARROW, AnswerBatch(2, 5000, 60, beams=64), {}, 318132147),
        (ON_GPU, AnswerBatch(64, 64, 64, beams=2), {}, 292658063),
        ({**ON_GPU, "offloaded_blocks": 4}, AnswerBatch(2, 64, 64), {}, 165661091),
    ],
)
def test_a_prediction_stays(plan: dict[str, Any], batch: AnswerBatch, others: dict[str, int], size: int) -> None:
    """Who changes a formula measures again, by the test above and its slow cases, and writes the new values here."""
    model = HeldModel.of(replace(SHAPE, vocab_size=32128, d_ff=4096), "float32", "float32", 100 * MIB)
    parts = replace(model, plan=replace(model.plan, **plan)).answering(batch, **others)
    assert sum(parts.values()) == size


def test_rows_are_measured_as_asked_or_as_many_as_fit() -> None:
    model = HeldModel.of(SHAPE, "bfloat16", "bfloat16", 100 * MIB)
    for longest in ((800, 130), (800, 0)):
        needs = [sum(model.measuring(rows, *longest).values()) for rows in range(1, 9)]
        for budget in needs:
            assert rows_to_measure(model, budget, "auto", 8, longest) == sum(need <= budget for need in needs)
        assert rows_to_measure(model, needs[4], 5, 8, longest) == 5
        for requested, budget, change in (("auto", needs[0] - 1, "max_seq_len=400"), (6, needs[4], "rows=3")):
            with pytest.raises(DoesNotFit) as refusal:
                rows_to_measure(model, budget, requested, 8, longest, flag="rows")
            assert change in str(refusal.value) and ("130" in str(refusal.value)) == (longest[1] > 0)
    assert [largest(5, lambda number: number <= most) for most in (0, 1, 4, 9)] == [0, 1, 4, 5]  # noqa: B023


def test_what_settings_and_folders_mean() -> None:
    drawn = GenerateConfig(temperature=1.0, top_k=0, top_p=1.0, num_beams=3, max_new_tokens=7)
    assert AnswerBatch.by(drawn, 2, 9) == AnswerBatch(2, 9, 7, beams=3)
    for change in ({"top_k": 1}, {"top_p": 0.9}):
        assert AnswerBatch.by(replace(drawn, **change), 2, 9).sampled
        assert not AnswerBatch.by(replace(drawn, **change, temperature=0.0), 2, 9).sampled
    assert HeldModel.of(SHAPE, "int8", "float32", 0).plan.storage == "int8"
    assert HeldModel.of(SHAPE, "float64", "float32", 0).plan.storage == "float32"
    for folder, compute, requested, dtypes in (
        ("int8", "float32", "auto", ["int8"]),
        ("float32", "float16", "auto", ["float16"]),
        ("float32", "bfloat16", "auto", ["bfloat16", "int8"]),
        ("bfloat16", "float32", "no", ["float32", "bfloat16"]),
        ("float32", "float32", "bf16", ["bfloat16"]),
    ):
        assert storage_dtypes(folder, compute, requested) == dtypes


def test_what_is_held_before_is_of_the_memory_that_the_budget_is_about() -> None:
    budget = Budget(0, 1, 0, (), "", 0)
    held = ProcessTree().usage().anon_bytes
    assert held / 2 < bytes_before(budget) < 2 * held
    assert bytes_before(replace(budget, device=FakeDevice(8 * MIB))) == 0  # type: ignore[arg-type]
