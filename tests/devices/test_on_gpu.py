"""A real GPU against the CPU: `pytest -m cuda`, or `-m mps` on a Mac. Skipped with a word where there is none.

The oracle of every number is the same code on the CPU in fp32, which the other tests hold against autograd and Hugging
Face; tolerances are those of another order of summation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from devices.base import Device
from devices.pointwise import why_no_rounding_kernel
from engine.blockwise import Blockwise
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.optimizers.rounding import round_stochastically
from engine.weights import WeightStore
from memory.cleanup import free_failed
from model.loss import LossSettings
from model.t5 import T5
from tests.end_to_end.running import Place, write_text
from tests.engine.small_models import Rectangle, small_model

MIB = 2**20


ONLY_CUDA = pytest.mark.parametrize("gpu", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)


def moved(model: T5, device: Device) -> T5:
    """The same weights on the GPU."""
    other = T5(model.config, device.torch_device)
    with torch.no_grad():
        for mine, original in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(original)
    return other


def test_rounding_compiles_and_gives_the_bits_of_the_cpu(gpu: Device) -> None:
    where = gpu.torch_device
    draw = torch.Generator().manual_seed(0)
    assert not why_no_rounding_kernel(where)
    values = torch.randn(3, 40, 64, generator=draw)
    values[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40])
    keys = torch.tensor([5, -6, 7])
    on_cpu = round_stochastically(values.clone(), keys, 128)
    on_gpu = round_stochastically(values.to(where), keys.to(where), 128)
    assert torch.equal(on_gpu.cpu().view(torch.int16), on_cpu.view(torch.int16))


@pytest.fixture
def limited(gpu: Device) -> Iterator[Callable[[int], None]]:
    """Set a hard limit of so many bytes above what is held; taken away again."""

    def limit(more: int) -> None:
        assert gpu.limit_memory(gpu.memory_now_bytes() + more)

    yield limit
    gpu.limit_memory(gpu.memory_total_bytes())


@ONLY_CUDA
def test_a_step_that_did_not_fit_is_freed_and_a_smaller_one_runs(gpu: Device, limited: Callable[[int], None]) -> None:
    model = moved(small_model("t5", d_model=256, d_ff=1024, num_heads=8, d_kv=32, vocab_size=512), gpu)
    optimizer = OPTIMIZERS["adafactor"](dict(model.named_parameters()))
    blockwise = Blockwise(model, 99, WeightStore(torch.float32), LossSettings(), 0.0)
    update = OptimizerInBackward(optimizer)
    batch = Rectangle(64, 512, 128, 512)

    def step(rows: int) -> None:
        micro_batch = batch.micro_batch(model, list(range(rows)))
        update.begin(Step(1, 0.01))
        update.finish(blockwise.gradients([micro_batch], micro_batch.num_labels, update))

    step(1)
    limited(192 * MIB)
    with pytest.raises(Exception) as caught:
        step(64)
    assert gpu.is_out_of_memory(caught.value)
    for weight in model.parameters():
        weight.grad = None
    free_failed(caught.value, gpu)
    gc.collect()
    gpu.cleanup()
    step(1)
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


SMALL = (
    "--d_model=256 --d_kv=32 --d_ff=1024 --num_heads=8 --num_layers=2 --num_decoder_layers=2 "
    "--vocab_size=1024 --max_seq_len=128 --max_steps=12 --effective_batch_size=8 --eval_steps=6 "
    "--save_steps=6 --sample_rows=1 --seed=3"
)


def trained(folder: Path, name: str, *flags: str) -> tuple[dict[int, float], dict[str, Any], Place]:
    place_of = Place(folder, folder / "cache")
    text = folder / "text.txt"
    if not text.exists():
        write_text(text, 600)
    place_of.do("train", f"--train_file={text}", f"--run_name={name}", *SMALL.split(), *flags)
    events = {event["event"]: event for event in place_of.events(name)}
    return place_of.losses(name), events, place_of


def test_a_run_has_the_losses_of_the_cpu_resumes_and_answers(gpu: Device, tmp_path: Path) -> None:
    on_cpu, _, _ = trained(tmp_path, "cpu", "--device=cpu", "--mixed_precision=no")
    on_gpu, _, place_of = trained(tmp_path, "gpu", f"--device={gpu.name}", "--mixed_precision=no")
    assert on_gpu.keys() == on_cpu.keys()
    for step, loss in on_cpu.items():
        assert on_gpu[step] == pytest.approx(loss, rel=2e-3), step
    place_of.do("train", "--is_keep_training=True", "--run_name=gpu", "--max_steps=14", f"--device={gpu.name}")
    assert max(place_of.losses("gpu")) == 14
    model = f"--model={place_of.runs / 'gpu'}"
    assert place_of.do("generate", model, f"--device={gpu.name}", "--input=the river runs", "--max_new_tokens=8").stdout
    place_of.do("evaluate", model, f"--device={gpu.name}", f"--validation_file={tmp_path / 'text.txt'}")


@pytest.mark.parametrize("mode", ["standard", "low", "ultra", "fp16", "compiled"])
def test_the_peak_is_the_planned_one(gpu: Device, tmp_path: Path, mode: str) -> None:
    if mode == "fp16" and not gpu.multiplies_fp16():
        pytest.skip("this GPU has no fp16")
    flags = {"fp16": "--mixed_precision=fp16", "compiled": "--compile=True"}
    if mode == "compiled" and (reason := gpu.why_not_compiling()):
        pytest.skip(reason)
    how = flags.get(mode, f"--memory_mode={mode}")
    _, events, _ = trained(tmp_path, mode, f"--device={gpu.name}", how)
    planned, measured = (events["end"][f"{name}_peak_bytes"] for name in ("planned", "measured"))
    print(f"{mode}: planned {planned / MIB:.0f} MiB, measured {measured / MIB:.0f} MiB ({measured / planned - 1:+.0%})")
    assert 0.1 * planned < measured < 1.1 * planned + 64 * MIB  # cuBLAS takes a workspace of up to 32 MiB


@ONLY_CUDA
def test_a_budget_of_the_device_is_kept(gpu: Device, tmp_path: Path) -> None:
    # This takes some 10 GiB where all blocks are saved.
    larger = ("--effective_batch_size=256", "--max_seq_len=512", "--max_steps=3")
    _, events, _ = trained(tmp_path, "tight", f"--device={gpu.name}", *larger, "--memory_budget=2G")
    assert events["plan"]["peak_bytes"] > 256 * MIB and events["end"]["measured_peak_bytes"] <= 2048 * MIB
