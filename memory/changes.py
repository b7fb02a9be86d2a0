"""What would other flags give? Each is planned as it would be if it were typed, so that both tables say the same.

A change is told only where its plan takes less memory; the one that costs the user least comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from config import Config, DoesNotFit
from memory.alternatives import COST, Alternative, adapts_a_base, may_change
from memory.estimate.precision import INT4
from memory.plan import Plan
from settings.fields import AUTO
from units import MIB

LEAST_MEMORY = 256 * MIB  # of a budget that is proposed
Value = int | str
PlanOf = Callable[[Config], Plan]


def planned_changes(config: Config, chosen: Plan, plan_of: PlanOf, most: int) -> list[Alternative]:
    """Changes of one flag after which the plan takes less.

    Args:
        chosen: the plan that they are compared with. plan_of: makes the plan of other settings. most: how many.
    """
    found = []
    ideas = [idea for idea in _ideas(config, chosen) if may_change(config, idea[0])]
    for name, value, label in sorted(ideas, key=lambda idea: COST.get(idea[2], COST.get(idea[0], 0))):
        with suppress(DoesNotFit):
            other = plan_of(config.changed(**{name: value}))
            if chosen.peak_bytes - other.peak_bytes > MIB:
                choice = other.choice
                found.append(
                    Alternative(
                        label, choice.batch_size_per_gpu, choice.saved_blocks, other.peak_bytes, other.seconds, True
                    )
                )
        if len(found) == most:
            break
    return found


def _ideas(config: Config, chosen: Plan) -> Iterator[tuple[str, Value, str]]:
    half = chosen.peak_bytes // 2 // MIB * MIB
    if half >= LEAST_MEMORY:
        yield "memory_budget", half, f"memory_budget={half // MIB}M"
    for mode in ("low", "ultra"):
        if config.memory.memory_mode != mode:
            yield "memory_mode", mode, f"memory_mode={mode}"
    if chosen.choice.storage == "float32" and config.memory.mixed_precision == AUTO and not config.lora.lora_rank:
        yield "mixed_precision", "bf16", "mixed_precision=bf16"
    if config.lora.lora_rank and chosen.choice.storage != INT4:
        yield "lora_base", INT4, "lora_base=int4"
    if config.train.optimizer not in ("adafactor", "sinkgd") and not config.lora.lora_rank:
        yield "optimizer", "adafactor", "optimizer=adafactor"
    if config.data.max_seq_len >= 16:
        yield "max_seq_len", config.data.max_seq_len // 2, f"max_seq_len={config.data.max_seq_len // 2}"
    if chosen.effective_batch_size > 1:
        fewer = chosen.effective_batch_size // 2
        yield "effective_batch_size", fewer, f"effective_batch_size={fewer}"
    if not config.lora.lora_rank and adapts_a_base(config):
        yield "lora_rank", 8, "lora_rank=8"
