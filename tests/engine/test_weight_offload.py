"""Weights that rest in a file, or beside a device, train to the same bits as weights in memory; what is absent is never
used.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from devices.copies import Carrier
from devices.machine_file import disk_rates
from engine.blockwise import Blockwise
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.weight_offload.backends import (
    CpuBackend,
    DiskBackend,
    OffloadBackend,
    StagedDiskBackend,
    UnlinkedTempFile,
    aligned_buffer,
)
from engine.weight_offload.store import OffloadedWeightStore
from engine.weights import WeightStore, weight_store_for
from model import hf_format
from model.decoding.generation import generate
from model.formats.peft import load_adapters, save_adapters
from model.lora.adapter import adapters_of, add_adapters
from model.lora.form import LoraSettings
from model.loss import LossSettings
from model.t5 import T5
from settings.errors import UserError
from tests.engine.small_models import Rectangle, small_model

BF16, FP32, INT8, INT4, CPU = torch.bfloat16, torch.float32, torch.int8, torch.int4, torch.device("cpu")
CUTS, STEPS = [[0, 3], [1], [2]], 3
Trained = tuple[list[float], dict[str, Tensor]]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[OffloadedWeightStore]]:
    """Those that are made; closed at the end."""
    made: list[OffloadedWeightStore] = []
    yield made
    for store in made:
        store.close()


def offloaded(
    folder: Path, made: list[OffloadedWeightStore], dtypes: tuple[torch.dtype, torch.dtype], away: int, beside: str = ""
) -> OffloadedWeightStore:
    """A weight store with a file in a folder; `beside`: "ram" or "file" of a device with memory of its own."""
    carrier = Carrier(CPU) if beside else None

    def backend(sizes: Sequence[int]) -> OffloadBackend:
        if carrier is None:
            return DiskBackend(folder, sizes)
        return CpuBackend(sizes, carrier) if beside == "ram" else StagedDiskBackend(folder, sizes, carrier)

    made.append(OffloadedWeightStore(*dtypes, away, backend, CPU, carrier))
    return made[-1]


def trained(
    model: T5,
    store: WeightStore,
    saved: int = 0,
    norm: float = 0.0,
    optimizer: str = "adafactor",
    together: int = len(CUTS),
) -> Trained:
    """Losses of a few steps, an evaluation among them, and the weights at the end."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    update = OptimizerInBackward(OPTIMIZERS[optimizer](weights), norm, weight_store=store)
    blockwise, batch, losses = Blockwise(model, saved, store, LossSettings(), 0.1), Rectangle(), list[float]()
    for number in range(1, STEPS + 1):
        update.begin(Step(number, 1e-2, 1e-3, seed=5))
        each = batch.micro_batches(model, CUTS)
        firsts = range(0, len(each), together)
        passes = [
            blockwise.gradients(each[at : at + together], batch.num_labels, update, at == firsts[-1]) for at in firsts
        ]
        loss, _ = update.finish(torch.stack(passes).sum())
        losses.append(loss)
        losses.append(float(blockwise.loss(batch.micro_batches(model, CUTS))))
    names = {id(weight): name for name, weight in model.named_parameters()}
    held = {names[id(weight)]: weight.detach().clone() for weight in store.each_loaded(model.parameters())}
    return losses, held


def assert_same(here: Trained, away: Trained) -> None:
    assert here[0] == away[0]
    assert here[1].keys() == away[1].keys()
    assert all(torch.equal(weight, away[1][name]) for name, weight in here[1].items())


@pytest.mark.parametrize(
    ("family", "dtypes", "away", "saved", "norm"),
    [("t5", (BF16, BF16), 5, 0, 0.0), ("t5-v1.1", (BF16, FP32), 2, 99, 0.0), ("umt5", (BF16, FP32), 3, 0, 0.1)],
)
def test_a_file_gives_the_bits_of_memory(
    family: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    away: int,
    saved: int,
    norm: float,
    tmp_path: Path,
    stores: list[OffloadedWeightStore],
) -> None:
    config = small_model(family).config
    here = T5(config, dtype=dtypes[0]).initialise(2)
    store, model = offloaded(tmp_path, stores, dtypes, away), T5(config, "meta", dtypes[0])
    store.allocate(model)
    model.initialise(2, store.filling)
    assert_same(trained(here, weight_store_for(*dtypes), saved, norm), trained(model, store, saved, norm))
    absent = [weight for weight in model.parameters() if weight.untyped_storage().nbytes() < weight.nbytes]
    assert absent and all(weight.isnan().all() for weight in absent), "what is not here is NaN"
    assert bool(store.buffers.read_bytes) == (away > 2), "two buffers hold two blocks"
    assert not list(tmp_path.iterdir()), "the file has no name"


@pytest.mark.parametrize("beside", ["ram", "file"])
def test_a_device_gives_the_same(beside: str, tmp_path: Path, stores: list[OffloadedWeightStore]) -> None:
    config = small_model().config
    here = T5(config, dtype=BF16).initialise(2)
    store, model = offloaded(tmp_path, stores, (BF16, FP32), 4, beside), T5(config, "meta", BF16)
    store.allocate(model)
    model.initialise(2, store.filling)
    assert_same(trained(here, weight_store_for(BF16, FP32)), trained(model, store))


@pytest.mark.parametrize(
    ("base", "together"),
    [(INT8, 3), (INT4, 2), (BF16, 1)],
)
def test_adapters_over_a_base_in_a_file(
    base: torch.dtype, together: int, tmp_path: Path, stores: list[OffloadedWeightStore]
) -> None:
    hf_format.save(small_model(), tmp_path / "base")
    (tmp_path / "disk").mkdir()
    here = hf_format.load(tmp_path / "base", base)
    store = offloaded(tmp_path / "disk", stores, (base, FP32), 5)
    model = hf_format.load(tmp_path / "base", base, allocate=store.allocate, filling=store.filling)
    settings = LoraSettings(2, 4.0)
    add_adapters(here, settings, seed=3)
    add_adapters(model, settings, seed=3)
    plain = weight_store_for(base, FP32, (here.embedding, here.output_weight))
    assert_same(
        trained(here, plain, optimizer="adamw", together=together),
        trained(model, store, optimizer="adamw", together=together),
    )
    assert adapters_of(model) and store.buffers.written_bytes <= sum(store.buffers.sizes), "a frozen base is only read"
    save_adapters(here, settings, tmp_path / "adapter", "base", "")
    for path, adapter in load_adapters(model, tmp_path / "adapter")[0].items():
        assert all(map(torch.equal, adapter.parameters(), adapters_of(here)[path].parameters())), path


def test_it_is_loaded_saved_and_answers_block_by_block(tmp_path: Path, stores: list[OffloadedWeightStore]) -> None:
    here = small_model("umt5")
    hf_format.save(here, tmp_path / "one")
    (tmp_path / "disk").mkdir()
    store = offloaded(tmp_path / "disk", stores, (FP32, FP32), 5)
    model = hf_format.load(tmp_path / "one", allocate=store.allocate, filling=store.filling)
    hf_format.save(model, tmp_path / "two", with_weights=store.loaded)
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    prompts, how = [[5, 6, 7, 1], [9, 1]], {"max_new_tokens": 8, "min_new_tokens": 8}
    answers = generate(model, prompts, with_weights=store.for_products, compute_dtype=FP32, **how)  # type: ignore[arg-type]
    assert answers == generate(here, prompts, **how)  # type: ignore[arg-type]


def test_a_step_reads_each_block_twice_and_writes_it_once(tmp_path: Path, stores: list[OffloadedWeightStore]) -> None:
    config = small_model().config
    store, model = offloaded(tmp_path, stores, (BF16, BF16), 5), T5(config, "meta", BF16)
    store.allocate(model)
    model.initialise(2, store.filling)
    blockwise, batch = Blockwise(model, 0, store, LossSettings(), 0.0), Rectangle()
    update, whole = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(model.named_parameters())), weight_store=store), 0
    for number in (1, 2, 3):
        read, written = store.buffers.read_bytes, store.buffers.written_bytes
        update.begin(Step(number, 1e-2))
        blockwise.gradients(batch.micro_batches(model, CUTS), batch.num_labels, update)
        whole = sum(store.buffers.sizes)
        assert store.buffers.read_bytes - read <= 2 * whole, "micro-batches pass through a block together"
    assert store.buffers.written_bytes - written == whole
    assert store.buffers.read_bytes - read < 2 * whole, "at the turns a block is there already"


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no room is taken ahead here")
def test_a_disk_that_is_too_small_is_noticed_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, first: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        UnlinkedTempFile(tmp_path, 4096)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["load", "store"])
def test_a_disk_that_fails_says_so(
    fails: str, tmp_path: Path, stores: list[OffloadedWeightStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_model().config
    store, model = offloaded(tmp_path, stores, (BF16, BF16), 5), T5(config, "meta", BF16)
    store.allocate(model)
    model.initialise(2, store.filling)

    def broken(block: int, buffer: Tensor) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store.buffers.backend, fails, broken)
    with pytest.raises(UserError, match=r"weights_in.*Input/output error.*last checkpoint"):
        trained(model, store)


def test_a_file_tells_the_next_plan_how_fast_its_disk_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clock = itertools.count()
    monkeypatch.setattr("engine.weight_offload.backends.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    for least, known in ((12288, None), (8192, (4096.0, 4096.0))):
        monkeypatch.setattr("engine.weight_offload.backends.TELLING_BYTES", least)
        backend, buffer = DiskBackend(tmp_path, [4096, 4096]), aligned_buffer(8192)
        for block in (0, 1):
            backend.store(block, buffer[:4096])
        for block in (0, 1):
            backend.load(block, buffer[4096:])
        backend.close()
        assert disk_rates(tmp_path) == known, "a second from look to look"
