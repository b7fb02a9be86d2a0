"""Which plan does a run get? What this machine offers and what the run needs, handed to `memory.plan`."""

from __future__ import annotations

import torch

from devices.base import Device
from memory.budget import Budget
from memory.plan import Plan, plan
from memory.prediction import Choice, Machine
from training.startup import Start

RATES = (torch.float32, torch.bfloat16)


def make_plan(begin: Start, device: Device, budget: Budget, base_bytes: int, num_processes: int) -> Plan:
    """Choose micro-batch, slices, kept graphs and dtypes; a resumed run keeps its choice where it still fits.

    Args:
        base_bytes: what the process takes already.
    Raises:
        DoesNotFit: no way fits the budget.
    """
    separate = device.is_separate_memory and budget.device_bytes is not None
    machine = Machine(
        budget_bytes=int(budget.device_bytes or 0) if separate else budget.host_bytes,
        available_bytes=budget.available_bytes,
        base_bytes=0 if separate else base_bytes,
        rates=tuple((str(dtype).removeprefix("torch."), device.multiply_rate(dtype)) for dtype in RATES),
        num_processes=num_processes,
    )
    choice = begin.state.choice
    source_tokens, target_tokens = map(max, begin.loader.longest, begin.validation.longest)
    return plan(
        begin.config,
        machine,
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        earlier=Choice(**choice) if choice else None,
    )
