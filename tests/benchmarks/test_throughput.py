"""The table of speed: ratios turn by turn, the share of the product rate, systems that failed, the bar."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import throughput
from benchmarks.parts.results import ratio
from benchmarks.throughput import WORKS, Work, main, notes, table
from settings.precedence import model_presets

GIB = 2**30


def run(system: str, turn: int, speed: float, peak: float, **more: Any) -> dict[str, Any]:
    return {
        "system": system, "turn": turn, "tokens_per_second": speed, "peak_bytes": int(peak * GIB), "share": 0.25,
        "high_water_bytes": int((peak + 0.5) * GIB), "compute": "fp32", "rates": {"fp32": 9e10, "bf16": 3e9}, **more,
    }  # fmt: skip


RUNS = [
    run("shipped", 0, 100, 4), run("shipped", 1, 50, 4), run("ours-ultra", 0, 150, 1), run("ours-ultra", 1, 100, 1.5),
    {"system": "tuned", "turn": 0, "failed": "no compiler"},
]  # fmt: skip


def test_ratios_are_taken_within_a_turn() -> None:
    assert ratio(RUNS[2:4], RUNS[:2]) == "1.50-2.00x at 0.38 of its peak"
    assert ratio(RUNS[2:4], RUNS[4:]) == "-"


def test_every_system_has_a_line_even_one_that_failed() -> None:
    _, _, shipped, tuned, ours = table(RUNS).splitlines()
    assert shipped.startswith("| shipped | 100 | 4.00 GiB | 4.50 GiB | 25% of fp32 |")
    assert "no compiler" in tuned
    assert ours.startswith("| ours-ultra | 150 | 1.50 GiB | 2.00 GiB | 25% of fp32 | 1.50-2.00x at 0.38")


def test_modes_are_held_against_standard_turn_by_turn() -> None:
    first = [run("ours-standard", 0, 100, 2), run("ours-low", 0, 96, 1), run("ours-ultra", 0, 75, 1)]
    second = [run("ours-standard", 1, 50, 2), run("ours-ultra", 1, 45, 1)]
    said = notes(WORKS["tiny"], [*first, *second])
    allowed = "the products that it makes once more allow"
    assert f"Bar, kept: ours-low at 96% of the speed of ours-standard; {allowed} 88%, and 83% are asked." in said
    told = "ours-ultra at 75% to 90% of the speed of ours-standard"
    assert f"Bar, kept in part: {told}; {allowed} 83%, and 79% are asked." in said
    assert any(line.startswith("Bar, **missed**: ours-ultra") for line in notes(WORKS["tiny"], first))


def test_recomputing_all_blocks_costs_a_forward_less_one_product() -> None:
    work = WORKS["t5-small"]
    shape, tokens = work.shape, work.rows * (work.source + work.target)
    forward = work.flops / 3
    head = 2 * shape.vocab_size * shape.d_model * work.rows * work.target
    last_products = 2 * shape.d_model * shape.d_ff * shape.num_layers * tokens
    again = work.flops / work.allowed("ours-ultra") - work.flops
    assert again == pytest.approx(forward - head - last_products)
    assert work.allowed("ours-standard") == 1 > work.allowed("ours-low") > work.allowed("ours-ultra")


def test_the_bar_is_on_all_resident_memory() -> None:
    work = Work("tiny", 1, 8, 8, bar_bytes=2 * GIB)
    assert "Bar, kept: at most 2.00 GiB of VmHWM; 2.00 GiB measured." in notes(work, RUNS)
    more = [*RUNS, run("ours-ultra", 2, 150, 1.6)]
    assert any(line.startswith("Bar, **missed**") for line in notes(work, more))
    assert notes(work, RUNS)[0].startswith("Measured product rates: fp32 90, bf16 3.0 GFLOP/s.")
    assert "The tuned peer computes in fp32, without" in notes(work, [*RUNS, run("tuned", 1, 150, 1)])[0]
    assert not any("ours-standard" in line for line in notes(work, RUNS)), "no mode to hold the others against"
    assert WORKS["t5-3b"].systems == ("ours-ultra",) and WORKS["t5-3b"].bar_bytes == 7.5 * GIB


def test_the_share_is_work_over_time_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("tiny", 2, 16, 4)
    printed = '{"seconds": [4.0, 2.0], "product_rate": 1e9, "high_water_bytes": 5}'
    child = throughput.children.Child(0, f"a warning\n{printed}\n", "", 9.0, 7, 6)
    monkeypatch.setattr(throughput.children, "run", lambda words: child)
    found = throughput.measure("ours-low", work)
    assert found["share"] == pytest.approx(work.flops / 2e9)
    assert (found["tokens_per_second"], found["peak_bytes"], found["high_water_bytes"]) == (20.0, 7, 5)


@pytest.mark.slow
def test_work_is_counted_as_torch_counts_it() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import T5Config, T5ForConditionalGeneration

    shape = model_presets()["tiny"]
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, use_cache=False))
    ids = torch.arange(40).view(2, 20)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids[:, :16].contiguous(), labels=ids[:, 16:].contiguous()).loss.backward()
    assert Work("tiny", 2, 16, 4).flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_mistyped_words_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown: t5-medium, ours; works are"):
        main(["t5-medium", "--systems=ours"])
