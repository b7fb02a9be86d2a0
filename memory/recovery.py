"""What happens after an out-of-memory error? Free everything, take a smaller micro-batch, keep the effective batch.

Idea: the error's traceback holds every tensor of the failed step, so nothing can be freed before its frames are
cleared. Then the micro-batch becomes the largest divisor of the step's rows that is at most half as large, and the
accumulation grows to match: the step sees the same rows as planned and the loss curve does not notice.
Source: the automatic micro-batching of Composer; the pitfalls of retry decorators that change the effective batch.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memory.budget import free_host_bytes
from memory.cleanup import clean_all
from memory.units import format_size, parse_size
from settings import DoesNotFit

if TYPE_CHECKING:
    from devices.base import Device

ADVICE = ("a smaller --max_seq_len", "--memory_mode=ultra", "a larger --memory_budget or a smaller --model_preset")
_NEEDED = re.compile(r"tried to allocate ([0-9.]+(?:e[0-9]+)?) ?([KMGT]i?B|bytes)?", re.IGNORECASE)


@dataclass(frozen=True)
class RecoveryRecord:
    """What was changed after an out-of-memory error."""

    phase: str
    old_batch_size: int  # rows of a micro-batch
    batch_size: int
    gradient_accumulation_steps: int | None  # None where the phase has no effective batch, as in evaluation
    needed_bytes: int | None  # None where the error does not say
    free_bytes: int  # when the error came
    report: str  # for the log

    def as_dict(self) -> dict[str, Any]:
        """The fields of a `recovery` event in metrics.jsonl."""
        return asdict(self)


def shrink(batch_size: int, rows_per_step: int | None = None) -> int | None:
    """Choose the next smaller micro-batch.

    Args:
        batch_size: rows of the micro-batch that was too large.
        rows_per_step: rows that this process contributes to one step; the result divides it.
    Returns:
        at most half of batch_size; None where a single row was too much.
    """
    sizes = range(batch_size // 2, 0, -1)
    return next((size for size in sizes if rows_per_step is None or rows_per_step % size == 0), None)


class Recovery:
    """Handles out-of-memory errors of one run, and remembers them.

    Args:
        device: where they happen.
        advice: the cheapest changes, named where nothing is left to shrink.
    """

    def __init__(self, device: Device, advice: Sequence[str] = ADVICE) -> None:
        self.device, self.advice = device, tuple(advice)
        self.records: list[RecoveryRecord] = []

    def after_out_of_memory(
        self, error: BaseException, *, phase: str, batch_size: int, rows_per_step: int | None = None, shape: str = ""
    ) -> RecoveryRecord:
        """Free the failed step and choose a smaller micro-batch. The caller runs the same step again.

        Args:
            error: for which `device.is_out_of_memory` holds; its frames lose their local variables.
            phase: "train", "evaluation", ...
            batch_size: rows of the micro-batch that failed.
            rows_per_step: rows that this process contributes to one step, kept exactly; None in evaluation.
            shape: further words on the batch, e.g. "512 + 114 tokens".
        Raises:
            DoesNotFit: a single row was too much; the text is the report with the cheapest changes.
        """
        needed, free = needed_bytes(error), self._free_bytes()
        drop_frames(error)
        clean_all(self.device)
        smaller = shrink(batch_size, rows_per_step)
        story = _story(phase, batch_size, shape, needed, free)
        if smaller is None:
            raise DoesNotFit(f"{story}; a single row does not fit. What helps most: {'; or '.join(self.advice)}")
        accumulation = rows_per_step // smaller if rows_per_step else None
        kept = f" x accumulation {accumulation}, effective batch unchanged" if accumulation else ""
        report = f"{story}; going on with micro-batch {smaller}{kept}; the same rows are run again"
        record = RecoveryRecord(phase, batch_size, smaller, accumulation, needed, free, report)
        self.records.append(record)
        return record

    def _free_bytes(self) -> int:
        return self.device.memory_free_bytes() if self.device.is_separate_memory else free_host_bytes()


def drop_frames(error: BaseException) -> None:
    """Let go of everything that the frames of an error, and of the errors behind it, still hold."""
    links, seen = [error], set()
    for link in links:  # grows while it is walked
        if id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        links += [behind for behind in (link.__cause__, link.__context__) if behind is not None]


def needed_bytes(error: BaseException) -> int | None:
    """Read from an error how much was asked for; None where it does not say."""
    match = _NEEDED.search(str(error))
    if match is None:
        return None
    number, unit = match.group(1).rstrip("."), (match.group(2) or "bytes").lower()
    try:
        return parse_size(number if unit == "bytes" else f"{number}{unit}")
    except ValueError:
        return None


def _story(phase: str, batch_size: int, shape: str, needed: int | None, free: int) -> str:
    batch = f"micro-batch {batch_size}" + (f" x {shape}" if shape else "")
    asked = "needed an amount that the error does not name" if needed is None else f"needed {format_size(needed)}"
    return f"out of memory in phase {phase} with {batch}: {asked}, {format_size(free)} were free"
