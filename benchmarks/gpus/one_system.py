"""Speed and memory of one system on a GPU: a child process of `benchmarks.gpus.speed`, which prints one JSON line.

    python -m benchmarks.gpus.one_system SYSTEM WORK DEVICE STEPS

SYSTEM: ours-standard, ours-low, ours-ultra (the engine that training runs, its weights bf16, Adafactor); eager, fused,
compiled (Hugging Face T5 in fp32 under bf16 autocast, with fused AdamW; its own attention, torch's, torch's and
torch.compile). All see the same random rows, from the host and anew in every step, and read the loss of each; padding is
the peers' own way to hold rows of different length.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpus.works import PEERS, flops_of, works
from benchmarks.throughput import saved_blocks
from benchmarks.traced.traced_step import TracedWork, batches_of, engine_of, planned_bytes
from data.batches.collate import Batch
from devices.base import Device, form_scores, name_of, place
from devices.choose import pick
from engine.optimizers import Step
from engine.step import Done
from settings.declared import T5ModelConfig

WARM_STEPS = 3  # libraries are loaded, kernels compiled, and the optimizer's state is made


def ours(work: TracedWork, device: Device) -> Callable[[int], float]:
    """The step of this project; gives the mean loss of a label."""
    form_scores(work.scores)
    engine, batches = engine_of(work, device), batches_of(work)
    labels = sum(batch.num_labels for batch in batches)

    def step(number: int) -> float:
        outcome = engine.step(Step(number, 1e-3, seed=1), batches, labels)
        if not isinstance(outcome, Done):
            raise RuntimeError(f"the step was not done: {outcome}")
        return outcome.loss / labels

    return step


def peer_step(
    shape: T5ModelConfig, batch: Batch, device: Device, compute: torch.dtype, attention: str, is_compiled: bool
) -> Callable[[int], float]:
    """A step of Hugging Face T5: fp32 weights, autocast, fused AdamW. It gives the mean loss.

    Args:
        attention: "eager" or "sdpa" (torch's fused attention).
        is_compiled: whether torch.compile compiles the model.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        d_kv=shape.d_kv,
        d_ff=shape.d_ff,
        num_layers=shape.num_layers,
        num_decoder_layers=shape.num_decoder_layers,
        num_heads=shape.num_heads,
        feed_forward_proj=shape.feed_forward_proj,
        tie_word_embeddings=shape.tie_word_embeddings,
        dropout_rate=shape.dropout_rate,
        use_cache=False,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    torch_device = device.torch_device
    model = T5ForConditionalGeneration(config).train().to(torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if is_compiled else model
    mask = (torch.arange(batch.input_ids.shape[1]) < torch.from_numpy(batch.input_lengths)[:, None]).long()
    host_inputs = {"input_ids": torch.from_numpy(batch.input_ids), "labels": torch.from_numpy(batch.labels)}
    if not mask.all():
        host_inputs["attention_mask"] = mask

    def step(number: int) -> float:
        inputs: dict[str, Tensor] = {name: place(tensor, torch_device) for name, tensor in host_inputs.items()}
        optimizer.zero_grad()
        with torch.autocast(torch_device.type, compute, enabled=compute != torch.float32):
            loss = run(**inputs).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def compute_dtype(work: TracedWork) -> torch.dtype:
    """The dtype of products, of all systems."""
    found: torch.dtype = getattr(torch, work.dtype)
    return found


def measured(system: str, work: TracedWork, device: Device, steps: int) -> dict[str, Any]:
    """Run some steps to warm up and `steps` timed ones.

    Returns:
        `peak_bytes` of tensors, `held_bytes` by the allocator, of all steps; `planned_bytes`: of tensors, 0 of a peer.
    """
    device.set_exact_fp32(False)  # the fast fp32 way for all
    device.reset_peak()
    mine = None
    if system not in PEERS:
        mine = replace(work, saved=saved_blocks(system.removeprefix("ours-"), work.num_blocks))
    if mine is None:
        (batch,), shape = batches_of(work), replace(work.model, dropout_rate=work.dropout)
        attention = "eager" if system == "eager" else "sdpa"
        step = peer_step(shape, batch, device, compute_dtype(work), attention, system == "compiled")
    else:
        step = ours(mine, device)
    began = time.perf_counter()
    losses, seconds = [step(1)], []
    first = time.perf_counter() - began
    losses += [step(number) for number in range(2, WARM_STEPS + 1)]
    gc.collect()
    for number in range(WARM_STEPS + 1, WARM_STEPS + steps + 1):
        device.synchronize()
        began = time.perf_counter()
        losses.append(step(number))
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    peaks = {
        "peak_bytes": torch.cuda.max_memory_allocated(device.torch_device),
        "held_bytes": device.memory_peak_bytes(),
    }
    planned = {"planned_bytes": 0 if mine is None else planned_bytes(mine)}
    rate = device.multiply_rate(compute_dtype(work))
    of_card = {"card": f"{device.name} {device.computes_on}", "card_bytes": device.memory_total_bytes()}
    found = {
        "seconds": seconds,
        "first_seconds": first,
        "losses": losses,
        "flops": flops_of(work),
        "product_rate": rate,
    }
    return {**found, **peaks, **planned, **of_card, "compute": name_of(compute_dtype(work))}


def main(system: str, name: str, where: str, steps: int, rows: int) -> None:
    """Measure, and print the figures; of system `free`, the bytes that the card has free."""
    device = pick(where)
    if system == "free":
        print(device.memory_free_bytes())
        return
    work = works(where, rows)[name]
    if device.fast_dtypes()[0] != torch.bfloat16:
        work = replace(work, dtype="float32")
    print(json.dumps(measured(system, work, device, steps)))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:6]))  # type: ignore[arg-type,call-arg]
