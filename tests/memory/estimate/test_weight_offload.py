"""Which blocks are offloaded, and how many bytes are in memory, pinned, mapped from a file and written back for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memory.estimate.weight_offload import (
    is_offloaded,
    mapped_bytes,
    offloaded_bytes,
    pinned_bytes,
    slots_bytes,
    transfer_seconds,
    written_back_bytes,
)
from memory.estimate.workload import FILE, RAM, ExecutionPlan, Machine, Workload, trained_counts
from settings.declared import LoraConfig, T5ModelConfig
from support.units import MIB

SHAPE = T5ModelConfig(
    vocab_size=999, d_model=64, d_ff=100, d_kv=16, num_heads=4, num_layers=3, num_decoder_layers=2
)  # Matrices of blocks: 64 x 64 in attention, 64 x 100 in feed-forward.
WORK = Workload(SHAPE, 4, 32, 16, False, "adafactor")
ADAPTED = replace(WORK, trained=trained_counts(SHAPE, LoraConfig(lora_rank=4), None))
PLAN = ExecutionPlan(4, 1, 1, 0, 4, "float32", "float32", MIB, weights_in=RAM, offloaded_blocks=4)
PAGE = 4096
# 64 x 100 numbers of four bytes fill 6.25 pages.
ENCODER_BLOCK = 4 * 4 * PAGE + 2 * 7 * PAGE
DECODER_BLOCK = ENCODER_BLOCK + 4 * 4 * PAGE


@pytest.mark.parametrize("num_blocks", range(1, 8))
def test_offloaded_blocks_are_spread_evenly(num_blocks: int) -> None:
    for count in range(num_blocks + 1):
        flags = [is_offloaded(block, num_blocks, count) for block in range(num_blocks)]
        assert [sum(flags[:end]) for end in range(num_blocks + 1)] == [
            end * count // num_blocks for end in range(num_blocks + 1)
        ]


def test_bytes_of_offloaded_blocks() -> None:
    """Two blocks of each stack are offloaded: 4 of 5."""
    machine = Machine(MIB, MIB, disk_rates=(1e6, 1e5))
    assert offloaded_bytes(WORK, PLAN) == written_back_bytes(WORK, PLAN) == 2 * ENCODER_BLOCK + 2 * DECODER_BLOCK
    assert written_back_bytes(ADAPTED, PLAN) == 0
    assert [slots_bytes(WORK, PLAN, replace(machine, num_processes=count)) for count in (1, 2)] == [
        2 * DECODER_BLOCK,
        3 * DECODER_BLOCK,
    ]
    # An encoder block has 30 pages, a decoder block 46: each buffer is rounded up to a power of two.
    assert pinned_bytes(WORK, PLAN) == 2 * 32 * PAGE + 2 * 64 * PAGE
    in_file = replace(PLAN, weights_in=FILE)
    assert pinned_bytes(WORK, in_file) == 64 * PAGE
    only_encoder = replace(WORK, model=replace(SHAPE, num_decoder_layers=0, num_layers=4, d_ff=128))
    assert pinned_bytes(only_encoder, in_file) == 64 * PAGE, "32 pages, and one to align them"
    assert pinned_bytes(WORK, replace(in_file, offloaded_blocks=0)) == 1
    size = offloaded_bytes(WORK, PLAN)
    assert transfer_seconds(WORK, PLAN, machine, 1e3) == (size / 1e3, size / 1e3)
    assert transfer_seconds(WORK, in_file, machine, 1e3) == (size / 1e6, size / 1e5)


@pytest.mark.parametrize(
    ("machine", "plan"),
    [({"device": "cuda"}, {}), ({"is_another": True}, {}), ({"base_bytes": 0}, {}), ({}, {"offloaded_blocks": 1})],
)
def test_a_base_stays_mapped_on_the_cpu_of_this_machine(machine: dict[str, Any], plan: dict[str, Any]) -> None:
    work = replace(ADAPTED, mapped=("float32", 1000))
    here = Machine(MIB, MIB)
    in_memory = replace(PLAN, offloaded_blocks=0)
    assert mapped_bytes(work, in_memory, here) == 4000
    assert mapped_bytes(work, replace(in_memory, storage="bfloat16"), here) == 0, "the file has another dtype"
    assert mapped_bytes(work, replace(in_memory, **plan), replace(here, **machine)) == 0
