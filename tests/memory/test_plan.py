"""The plan keeps the effective batch, keeps to the budget, prefers speed, and says what helps where nothing fits."""

from __future__ import annotations

from typing import Any

import pytest

from devices import processor
from devices.processor import AMX_BF16, AVX512, Processor
from memory.estimate.workload import Machine
from memory.machines import target_machine
from memory.plan import NEARLY, plan
from settings.declared import Config
from settings.loading import load
from support.units import GIB, MIB

GB = 1000**3


pytestmark = pytest.mark.usefixtures("processor_class")


def machine(
    budget: int,
    available: int = 16 * GB,
    kind: Processor | None = None,
    processes: int = 1,
    installed: float = 16 * GB,
) -> Machine:
    kind = kind or processor.here()
    rates = tuple((dtype, kind.rate(dtype, 2)) for dtype in ("float32", "bfloat16"))
    return Machine(
        budget, available, 170 * MIB, rates, processes, speed_class=kind.name, installed_bytes=int(installed)
    )


def settings_of(**flags: Any) -> Config:
    return load("train", {"train_file": "x", **{name: str(value) for name, value in flags.items()}})


@pytest.mark.parametrize("flags", [{}, {"is_finetune": True, "lora_rank": 8}])
def test_more_budget_is_never_slower_and_the_peak_stays_inside(flags: dict[str, Any]) -> None:
    config = settings_of(model_preset="t5-base", effective_batch_size=8, max_seq_len=256, **flags)
    fastest = float("inf")
    for budget in (1.7, 2, 4):
        chosen = plan(config, machine(int(budget * GIB)))
        assert chosen.peak_bytes <= budget * GIB
        assert sum(chosen.components.values()) == chosen.peak_bytes == max(chosen.phases.values())
        assert chosen.seconds <= NEARLY * fastest
        fastest = min(fastest, chosen.seconds)


def test_low_takes_much_less_memory_at_nearly_the_speed_and_ultra_the_least() -> None:
    config = settings_of(model_preset="t5-base", effective_batch_size=8)
    fast, low, ultra = (
        plan(config.with_changes(memory_mode=mode), machine(8 * GIB)) for mode in ("standard", "low", "ultra")
    )
    assert low.seconds <= NEARLY * fast.seconds
    assert ultra.peak_bytes < low.peak_bytes < 0.7 * fast.peak_bytes
    assert ultra.choice.saved_blocks == 0


def test_bf16_at_rest_and_in_products_only_where_it_is_fast() -> None:
    config = settings_of(model_preset="t5-base", effective_batch_size=2)
    fast = plan(config, machine(8 * GIB, kind=AMX_BF16)).choice
    assert (fast.storage, fast.compute) == ("bfloat16", "bfloat16")
    roomy, tight = (plan(config, machine(int(size * GIB), kind=AVX512)).choice for size in (8, 1.15))
    assert (roomy.storage, roomy.compute) == ("float32", "float32")
    assert (tight.storage, tight.compute) == ("bfloat16", "float32")


def test_a_card_without_bf16_computes_in_fp16() -> None:
    config = settings_of(model_preset="t5-small", effective_batch_size=8)
    card = target_machine("gpu_16gb_t4")
    in_fp16, in_fp32 = (plan(config.with_changes(mixed_precision=words), card) for words in ("auto", "no"))
    assert (in_fp16.choice.storage, in_fp16.choice.compute) == ("bfloat16", "float16")
    assert any("float16" in reason for reason in in_fp16.reasons)
    assert in_fp16.peak_bytes < 0.75 * in_fp32.peak_bytes and in_fp16.seconds < in_fp32.seconds
