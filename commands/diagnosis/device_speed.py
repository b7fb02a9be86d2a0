"""How long a step and an answer take on a device, what the step waits for, and beside Hugging Face T5.

Imports torch; each function runs in a child process of `doctor --check`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

import devices
from commands.diagnosis.device_check import Finding
from commands.diagnosis.device_numbers import batch_of, measured
from data.batches.collate import Batch
from devices.base import Device, dtype_of, place, traits_of
from devices.pointwise import why_not_compiled
from engine.optimizers import Step
from engine.step import Engine
from memory.cleanup import free_failed
from memory.probe import ProbeRequest
from model.decoding.generation import generate
from settings.declared import Config, T5ModelConfig
from training.setup.build import build
from training.setup.resolved import ResolvedRun

STEPS, WARM_STEPS, ANSWER_TOKENS = 5, 2, 64
BUSY = 0.9  # share of a step in which the device computes, below which the host holds it up


@dataclass(frozen=True)
class Timed:
    """Seconds of a step, and the most bytes that its tensors took on the device."""

    seconds: float
    tensor_bytes: int


def facts(config: Config) -> list[Finding]:
    """What the device and its driver say of themselves, and whether a first kernel runs."""
    device = devices.pick(config.run.device)
    told = [Finding("facts", what, found) for what, found in device.facts().items()]
    if traits_of(device.torch_device).has_compiler:
        compiled = why_not_compiled(device.torch_device) or "compiled by torch"
        told.append(Finding("facts", "kernels of dropout and rounding", compiled))

    def first_kernel(device: Device) -> float:
        return abs(float((torch.zeros(1, device=device.torch_device) + 1).cpu()) - 1)

    first = measured("first kernel", "--device=cpu", 0.0, first_kernel, device)
    return [*told, replace(first, part="facts")]


def steps(request: ProbeRequest) -> tuple[list[Finding], Timed]:
    """Waits, speed, answers and a recovered out-of-memory error of the step that a plan has chosen."""
    config, choice = request.config, request.choice
    device = devices.pick(config.run.device)
    run = ResolvedRun(config)
    run.device = device
    engine = build(run, choice)
    lengths = [pair for micro_batch in request.steps[0] for pair in micro_batch]
    size = choice.batch_size_per_gpu
    batches = [batch_of(config.model, lengths[first : first + size]) for first in range(0, len(lengths), size)]
    labels = sum(batch.num_labels for batch in batches)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        engine.attempt(Step(number, 1e-4, seed=1), batches, labels)

    timed = time_steps(device, step)
    tokens = sum(map(sum, lengths))
    found = [Finding("speed", "tokens a second", f"{tokens / timed.seconds:,.0f}")]
    found += _waits(device, step)
    found += _busy(device, step, timed.seconds)
    found += _answers(engine, config)
    found += _recovered(device, engine, batches, labels)
    return found, timed


def time_steps(device: Device, step: Callable[[], object]) -> Timed:
    """Of the fastest of some steps, after some to warm up."""
    for _ in range(WARM_STEPS):
        step()
    device.reset_peak()
    seconds = []
    for _ in range(STEPS):
        device.synchronize()
        began = time.perf_counter()
        step()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return Timed(min(seconds), device.tensor_peak_bytes())


def _waits(device: Device, step: Callable[[], object]) -> list[Finding]:
    with device.counted_waits() as places:
        step()
    if places is None:
        return []
    told = f"{len(places)}: {', '.join(sorted(set(places))[:3])}" if places else "none"
    return [Finding("waits", "host waits of a step", told, "1", len(places) <= 1)]


def _busy(device: Device, step: Callable[[], object], seconds: float) -> list[Finding]:
    if device.is_host:
        return []
    kinds = {torch.profiler.ProfilerActivity.CUDA} & set(torch.profiler.supported_activities())
    if not kinds:
        return []
    with torch.profiler.profile(activities=list(kinds)) as profile:
        step()
        device.synchronize()
    kernels = [event for event in profile.events() or [] if event.device_type.name == "CUDA"]
    share = sum(event.device_time for event in kernels) / 1e6 / seconds
    told = f"{share:.0%} of a step, {len(kernels):,} kernels"
    told += "" if share >= BUSY else "; the host is the slower one: more tokens a step would be faster a token"
    return [Finding("speed", "the device computes", told)]


def _answers(engine: Engine, config: Config) -> list[Finding]:
    store, found = engine.blockwise.weight_store, []
    for rows in (1, 8):
        prompts = [[3 + row] * 32 for row in range(rows)]

        def write(prompts: list[list[int]] = prompts) -> int:
            answers = generate(
                engine.model, prompts, max_new_tokens=ANSWER_TOKENS, with_weights=store.in_compute_dtype,
                compute_dtype=store.compute_dtype,
            )  # fmt: skip
            return sum(map(len, answers))

        write()
        began = time.perf_counter()
        tokens = write()
        rate = tokens / (time.perf_counter() - began)
        found.append(Finding("speed", f"answers, {rows} at a time", f"{rate:,.0f} tokens a second"))
    return found


def _recovered(device: Device, engine: Engine, batches: list[Any], labels: int) -> list[Finding]:
    """A step that finds no memory is freed, and the next one, which does, is made."""
    if not device.limit_memory(device.memory_total_bytes()):
        return []
    device.cleanup()
    device.limit_memory(device.memory_now_bytes() + 1)
    outcome = engine.step(Step(100, 1e-4), batches, labels)
    device.limit_memory(device.memory_total_bytes())
    if outcome.failure is not None:
        free_failed(outcome.failure, device)
    again = engine.step(Step(100, 1e-4), batches, labels)
    told = "recovered" if again.is_done else "the next step failed too"
    told = told if outcome.is_out_of_memory else "a limit of the device is not kept"
    return [Finding("memory", "a step without memory, then one with", told, "recovered", told == "recovered")]


def peer(shape: T5ModelConfig, rows: int, source: int, target: int, name: str, dtype: str) -> Timed:
    """The same step by Hugging Face T5 with torch's fused attention.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    device = devices.pick(name)
    device.set_exact_fp32(False)
    step, number = peer_step(shape, batch_of(shape, [(source, target)] * rows), device, dtype_of(dtype)), count(1)
    return time_steps(device, lambda: step(next(number)))


def peer_step(
    shape: T5ModelConfig, batch: Batch, device: Device, compute: torch.dtype, attention: str = "sdpa", is_compiled: bool = False
) -> Callable[[int], float]:  # fmt: skip
    """A step of Hugging Face T5, as those who care for speed train it: fp32 weights, autocast, fused AdamW. Gives the mean loss."""
    from transformers import T5Config, T5ForConditionalGeneration

    fields = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads")
    known = {
        name: getattr(shape, name) for name in (*fields, "feed_forward_proj", "tie_word_embeddings", "dropout_rate")
    }
    config = T5Config(**known, use_cache=False, decoder_start_token_id=0, attn_implementation=attention)
    torch.manual_seed(0)
    where = device.torch_device
    model = T5ForConditionalGeneration(config).train().to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if is_compiled else model
    mask = (torch.arange(batch.input_ids.shape[1]) < torch.from_numpy(batch.input_lengths)[:, None]).long()
    host = {"input_ids": torch.from_numpy(batch.input_ids), "labels": torch.from_numpy(batch.labels)}
    if not mask.all():
        host["attention_mask"] = mask

    def step(number: int) -> float:
        inputs: dict[str, Tensor] = {name: place(tensor, where) for name, tensor in host.items()}
        optimizer.zero_grad()
        with torch.autocast(where.type, compute, enabled=compute != torch.float32):
            loss = run(**inputs).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
