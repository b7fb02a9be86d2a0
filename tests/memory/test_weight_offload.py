"""Weights rest where they fit: in memory, in the RAM beside a device, in a file; and as few of them elsewhere as it
takes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import devices
from common.units import GIB, MIB
from engine.weight_offload.store import offloaded_store
from memory.estimate.weight_offload import PIECE_ALIGNMENT, offloaded_bytes, resident_bytes, slots_bytes
from memory.estimate.workload import BASE_BYTES, DEVICE, FILE, RAM, Machine
from memory.plan import Plan, plan
from memory.step_work import make_work
from model import hf_format
from model.shapes import weight_counts
from model.t5 import T5
from settings.declared import Config
from settings.loading import load

RATES = (("float32", 1e11), ("bfloat16", 1e12))


def settings_of(**flags: object) -> Config:
    common = {"model_preset": "t5-base", "max_seq_len": 64, "effective_batch_size": 4, "preset": "none", **flags}
    return load("train", {name: str(value) for name, value in common.items()})


def planned(budget: int, host_bytes: int = 0, **flags: object) -> Plan:
    base = 0 if host_bytes else BASE_BYTES
    machine = Machine(budget, 16 * GIB, base, RATES, host_bytes=host_bytes)
    return plan(settings_of(**flags), machine, source_tokens=64, target_tokens=32)


def test_a_file_is_used_where_memory_ends_and_only_as_far() -> None:
    weights = 2 * weight_counts(settings_of().model)["total"]
    roomy, tight, tighter = (planned(BASE_BYTES + size) for size in (6 * weights, weights, weights // 2 + 100 * MIB))
    assert (roomy.choice.weights_in, roomy.choice.offloaded_blocks) == (DEVICE, 0)
    assert tight.choice.weights_in == tighter.choice.weights_in == FILE
    assert 0 < tight.choice.offloaded_blocks < tighter.choice.offloaded_blocks
    for chosen in (tight, tighter):
        assert chosen.peak_bytes <= chosen.budget_bytes
        assert any("offloaded to a file" in reason for reason in chosen.reasons)
    assert roomy.seconds <= tight.seconds <= tighter.seconds, "more memory is faster"


def test_beside_a_device_the_ram_comes_before_a_file() -> None:
    weights = 2 * weight_counts(settings_of().model)["total"]
    assert planned(weights, host_bytes=64 * GIB).choice.weights_in == RAM
    assert planned(weights, host_bytes=40 * MIB).choice.weights_in == FILE
    choice = planned(8 * weights, host_bytes=64 * GIB, weights_in=RAM).choice
    assert (choice.weights_in, choice.offloaded_blocks) == (RAM, 24), "all of them, where it is named"


@pytest.mark.parametrize(("storage", "blocks"), [("int8", 2), ("int4", 4)])
def test_what_a_quantized_base_takes_is_what_is_planned(storage: str, blocks: int, tmp_path: Path) -> None:
    shape = {"d_model": 64, "d_ff": 160, "num_layers": 2, "num_decoder_layers": 2, "vocab_size": 512}
    config = settings_of(is_finetune=True, lora_rank=2, lora_base=storage, weights_in=FILE, **shape)
    hf_format.save(T5(config.model).initialise(0), tmp_path)
    machine = Machine(8 * GIB, 16 * GIB, BASE_BYTES, RATES)
    chosen = plan(config, machine, source_tokens=64, target_tokens=32).choice
    assert (chosen.storage, chosen.offloaded_blocks) == (storage, 4)
    choice = replace(chosen, offloaded_blocks=blocks)
    work = make_work(config, machine, 64, 32)
    store = offloaded_store(choice, devices.pick("cpu"), tmp_path)
    keywords = {} if store is None else {"allocate": store.allocate, "filling": store.filling}
    model = hf_format.load(tmp_path, getattr(torch, storage), **keywords)
    in_fp32 = [weight for weight in model.parameters() if weight.dtype == torch.float32]  # These are norms and bias.
    narrow = [weight for weight in model.parameters() if weight.dtype != torch.float32]
    resident = sum(weight.nbytes for weight in narrow if weight.untyped_storage().nbytes() >= weight.nbytes)
    resident += sum(weight.numel() for weight in in_fp32)
    # Matrices in the file are filled up to whole pages.
    assert 0 <= resident - resident_bytes(work, choice) <= 10 * PIECE_ALIGNMENT * blocks
    if store is not None:
        assert offloaded_bytes(work, choice) == sum(store.buffers.sizes)
        assert slots_bytes(work, choice, machine) == 2 * max(size for size in store.buffers.sizes)
        store.close()
