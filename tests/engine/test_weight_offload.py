"""Weights that rest in a file, or beside a device, train to the same bits as weights in memory; what is absent is never
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.blockwise import Blockwise
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.weight_offload.prefetch import PrefetchBuffers
from engine.weight_offload.store import OffloadedWeightStore, offloaded_store
from engine.weights import WeightStore, weight_store_for
from memory.estimate.workload import FILE, RAM, ExecutionPlan
from model import hf_format
from model.decoding.generation import generate
from model.lora.adapter import adapters_of, add_adapters
from model.lora.form import LoraSettings
from model.loss import LossSettings
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from support.units import GIB
from tests.engine.small_models import Rectangle, small_model
from tests.fake_device import FakeDevice

PLAN = ExecutionPlan(4, 1, 1, 0, 4, "float32", "float32", 1 << 20)
CUTS = [[0, 3], [1], [2]]
STEPS = 3
Trained = tuple[list[float], dict[str, Tensor]]


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[Callable[..., OffloadedWeightStore]]:
    """Makes a weight store with so many blocks elsewhere: in a file, or beside a device with memory of its own."""
    opened = ExitStack()

    def make(storage: str, compute: str, blocks: int, weights_in: str = FILE, beside: bool = False) -> Any:
        plan = replace(PLAN, storage=storage, compute=compute, offloaded_blocks=blocks, weights_in=weights_in)
        store = offloaded_store(plan, FakeDevice(GIB if beside else 0), tmp_path / "disk")
        assert store is not None
        opened.callback(store.close)
        return store

    with opened:
        yield make


def made_in(store: OffloadedWeightStore, config: T5ModelConfig) -> T5:
    """A model whose weights lie in a store."""
    model = T5(config, "meta", store.storage)
    store.allocate(model)
    return model.initialise(2, store.filling)


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
    blockwise = Blockwise(model, saved, store, LossSettings(), 0.1)
    batch = Rectangle()
    losses = list[float]()
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
    final = {names[id(weight)]: weight.detach().clone() for weight in store.each_loaded(model.parameters())}
    return losses, final


def assert_same(here: Trained, away: Trained) -> None:
    assert here[0] == away[0]
    assert here[1].keys() == away[1].keys()
    assert all(torch.equal(weight, away[1][name]) for name, weight in here[1].items())


@pytest.mark.parametrize(
    ("family", "storage", "compute", "blocks", "saved", "norm", "weights_in", "beside"),
    [
        ("t5-v1.1", "bfloat16", "float32", 2, 99, 0.0, FILE, False),
        ("umt5", "bfloat16", "float32", 3, 0, 0.1, FILE, False),
        ("t5", "bfloat16", "float32", 4, 0, 0.0, RAM, True),
    ],
)
def test_offloaded_weights_give_the_bits_of_memory(
    family: str,
    storage: str,
    compute: str,
    blocks: int,
    saved: int,
    norm: float,
    weights_in: str,
    beside: bool,
    tmp_path: Path,
    offloaded: Callable[..., OffloadedWeightStore],
) -> None:
    config = small_model(family).config
    here = T5(config, dtype=getattr(torch, storage)).initialise(2)
    store = offloaded(storage, compute, blocks, weights_in, beside)
    model = made_in(store, config)
    in_memory = weight_store_for(getattr(torch, storage), getattr(torch, compute))
    assert_same(trained(here, in_memory, saved, norm), trained(model, store, saved, norm))
    absent = [weight for weight in model.parameters() if weight.untyped_storage().nbytes() < weight.nbytes]
    assert absent and all(weight.isnan().all() for weight in absent), "what is not here is NaN"
    assert not list(tmp_path.glob("disk/*")), "the file has no name"


@pytest.mark.parametrize(("base", "together"), [("int8", 1), ("int4", 2)])
def test_adapters_over_a_base_in_a_file(
    base: str, together: int, tmp_path: Path, offloaded: Callable[..., OffloadedWeightStore]
) -> None:
    hf_format.save(small_model(), tmp_path / "base")
    dtype = getattr(torch, base)
    here = hf_format.load(tmp_path / "base", dtype)
    store = offloaded(base, "float32", 5)
    model = hf_format.load(tmp_path / "base", dtype, allocate=store.allocate, filling=store.filling)
    settings = LoraSettings(2, 4.0)
    add_adapters(here, settings, seed=3)
    add_adapters(model, settings, seed=3)
    plain = weight_store_for(dtype, torch.float32, (here.embedding, here.output_weight))
    assert_same(
        trained(here, plain, optimizer="adamw", together=together),
        trained(model, store, optimizer="adamw", together=together),
    )
    assert adapters_of(model) and store.buffers.written_bytes <= sum(store.buffers.sizes), "a frozen base is only read"


def test_it_is_loaded_saved_and_answers_block_by_block(
    tmp_path: Path, offloaded: Callable[..., OffloadedWeightStore]
) -> None:
    here = small_model("umt5")
    hf_format.save(here, tmp_path / "one")
    store = offloaded("float32", "float32", 5)
    model = hf_format.load(tmp_path / "one", allocate=store.allocate, filling=store.filling)
    hf_format.save(model, tmp_path / "two", with_weights=store.loaded)
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    prompts = [[5, 6, 7, 1], [9, 1]]
    lengths: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8}
    answers = generate(model, prompts, with_weights=store.for_products, compute_dtype=torch.float32, **lengths)
    assert answers == generate(here, prompts, **lengths)


def test_a_disk_that_fails_says_so(
    offloaded: Callable[..., OffloadedWeightStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = offloaded("bfloat16", "bfloat16", 5)
    model = made_in(store, small_model().config)

    def broken(block: int, buffer: Tensor) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store.buffers.backend, "store", broken)
    with pytest.raises(UserError, match=r"weights_in.*Input/output error.*last checkpoint"):
        trained(model, store)


def test_bytes_move_in_order_once_the_computation_has_come_there() -> None:
    moves = list[str]()
    backend: Any = SimpleNamespace(
        store=lambda block, memory: moves.append(f"store{block}"),
        load=lambda block, memory: moves.append(f"load{block}"),
        close=lambda: moves.append("closed"),
    )
    memory = [torch.empty(8) for _ in range(2)]
    buffers = PrefetchBuffers(backend, [4, 6, 8], memory, lambda: partial(moves.append, "reached"))
    for block in (0, 1, 1, 2, 0):
        assert len(buffers.acquire(block)) == buffers.sizes[block]
        assert buffers.release(block, is_changed=block < 2)
    assert len(buffers.acquire(2)) == len(buffers.acquire(2)) == 8
    assert buffers.prefetch(1) is not None
    buffers.acquire(1)
    assert buffers.prefetch(0) is None, "both are in use"
    assert not buffers.release(2) and buffers.release(2)
    buffers.close()
    expected = "reached reached reached store0 reached store1 load0 reached store0 load1 closed"
    assert " ".join(moves) == expected, "block 2 was not changed: it is neither stored nor loaded"
    assert (buffers.read_bytes, buffers.written_bytes) == (4 + 6, 4 + 6 + 4)
