from __future__ import annotations

import gc
import weakref

import pytest
import torch

from memory import recovery
from memory.recovery import Recovery, needed_bytes, shrink
from settings import DoesNotFit
from tests.fake_device import OUT_OF_MEMORY, FakeDevice

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("batch_size", "rows", "expected"),
    [(8, None, 4), (9, None, 4), (1, None, None), (8, 16, 4), (5, 15, 1), (12, 36, 6), (10, 30, 5), (1, 4, None)],
)
def test_shrink_at_least_halves_and_divides_the_rows(batch_size, rows, expected):
    assert shrink(batch_size, rows) == expected


def run_step(device, recovery, rows, row_bytes, batch_size):
    """The trainer's pattern: the same rows again with smaller micro-batches, until they fit."""
    seen = []
    while True:
        seen.clear()
        try:
            for first in range(0, rows, batch_size):
                device.release(device.allocate(row_bytes * batch_size))
                seen.extend(range(first, first + batch_size))
            return batch_size, seen
        except BaseException as error:
            if not device.is_out_of_memory(error):
                raise
            batch_size = recovery.after_out_of_memory(
                error, phase="train", batch_size=batch_size, rows_per_step=rows
            ).batch_size


@pytest.mark.parametrize("flavour", OUT_OF_MEMORY)
def test_every_flavour_ends_with_the_largest_fitting_micro_batch_and_the_same_rows(flavour):
    device = FakeDevice(100 * MIB, flavour)
    handler = Recovery(device)
    batch_size, seen = run_step(device, handler, rows=24, row_bytes=30 * MIB, batch_size=24)
    assert batch_size == 3 and seen == list(range(24))
    assert [record.batch_size * record.gradient_accumulation_steps for record in handler.records] == [24] * 3
    assert device.cleanups == 3


def test_report_names_phase_batch_needed_free_and_change():
    device = FakeDevice(8 * GIB)
    device.allocate(7 * GIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.allocate(2 * GIB)
    record = Recovery(device).after_out_of_memory(
        caught.value, phase="train", batch_size=8, rows_per_step=32, shape="512 + 114 tokens"
    )
    for part in ("phase train", "micro-batch 8 x 512 + 114 tokens", "needed 2.00 GiB", "1.00 GiB were free",
                 "micro-batch 4 x accumulation 8", "effective batch unchanged"):  # fmt: skip
        assert part in record.report
    assert record.as_dict()["needed_bytes"] == 2 * GIB and record.as_dict()["free_bytes"] == GIB


def test_evaluation_shrinks_without_touching_the_effective_batch(monkeypatch):
    monkeypatch.setattr(recovery, "free_host_bytes", lambda: 5 * MIB)
    record = Recovery(FakeDevice()).after_out_of_memory(MemoryError(), phase="evaluation", batch_size=16)
    assert record.batch_size == 8 and record.gradient_accumulation_steps is None
    assert record.free_bytes == 5 * MIB and "effective" not in record.report


def test_nothing_left_to_shrink_says_what_helps():
    handler = Recovery(FakeDevice(MIB))
    with pytest.raises(DoesNotFit) as caught:
        handler.after_out_of_memory(MemoryError(), phase="train", batch_size=1, rows_per_step=8)
    assert caught.value.exit_code == 3 and handler.records == []
    for part in ("phase train", "single row", "--max_seq_len", "--memory_mode=ultra", "--memory_budget"):
        assert part in str(caught.value)


class Activation:
    pass


def fail_with(kept):
    activation = Activation()
    kept.append(weakref.ref(activation))
    try:
        raise KeyError("first")
    except KeyError:
        raise MemoryError from None  # the first error stays behind as context


def test_what_the_failed_frames_held_is_freed_while_the_error_is_handled():
    kept: list[weakref.ref] = []
    gc.disable()
    try:
        fail_with(kept)
    except MemoryError as error:
        assert kept[0]() is not None
        Recovery(FakeDevice(MIB)).after_out_of_memory(error, phase="train", batch_size=2)
        assert kept[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("flavour", "expected"),
    [("cuda", 2 * GIB), ("mps", 2 * GIB), ("cpu", 2 * GIB), ("windows", 2 * GIB), ("c++", None), ("python", None)],
)
def test_needed_bytes_are_read_from_the_error(flavour, expected):
    assert needed_bytes(OUT_OF_MEMORY[flavour](2 * GIB)) == expected
