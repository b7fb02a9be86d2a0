"""The child process of `memory.probe`, which runs a plan's largest steps; it writes no file.

The same parts as in a run, made by the same function, see rows of the planned lengths with random ids: load,
evaluation, the steps (with the optimizer's state from the second on), evaluation again, and a few answers. The peak of
each phase is the kernel's own, or the device's. A budget that is overrun ends this process; the run itself is not
touched. Source: proc_pid_status(5), VmHWM; proc_pid_clear_refs(5), value 5; getrusage(2).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator

import devices
from data.batches.collate import Batch
from data.batches.loader import StepLoader
from data.batches.step_lengths import evaluation_lengths, step_lengths
from data.tokenizers.tokenizer import Tokenizer
from devices.base import Device
from devices.malloc import tune_malloc
from devices.sizes import SAMPLE_TOKENS
from devices.threads import use_threads
from engine.optimizers import Step
from engine.step import to_micro_batch
from memory.cleanup import Cleaner
from memory.estimate.shapes import MicroBatchRows
from memory.probe import ProbeRequest
from memory.processes import ROOT, has_proc, sizes_of
from model.decoding.answer_tree import AnswerTree
from model.decoding.generation import generate
from support.child_process import stay_within
from training.setup.answer_list import TREE_FILE
from training.setup.build import build
from training.setup.resolved import Beginning

PRODUCT_SIDE = 512  # Large enough for the library of products to take its buffers.
LEAST_STEPS = 4  # The optimizer's state is made in the first, and the heap settles after the third.


class PhasePeaks:
    """The most memory of this process in each phase, on the device and, where that shares the RAM, on the host."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.phases: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs until the end of the context."""
        restart_peak()
        self.device.reset_peak()
        yield
        self.phases[name] = max(self.now(), self.phases.get(name, 0))

    def now(self) -> int:
        """The most since the phase began, in bytes."""
        on_device = self.device.memory_peak_bytes()
        return on_device if self.device.is_separate_memory else peak_bytes() + on_device


def restart_peak(root: Path = ROOT) -> None:
    """Let `peak_bytes` begin anew at what is held now, where the system can."""
    with suppress(OSError):
        (root / "proc/self/clear_refs").write_text("5")


def peak_bytes(root: Path = ROOT) -> int:
    """The most anonymous memory of this process since `restart_peak`, in bytes.

    Samples miss what lives between them; the kernel does not. Without /proc it is the most resident memory of the
    process's whole life, so that a later figure is at least the earlier ones.
    """
    if has_proc(root):
        status = sizes_of(root / "proc/self/status")
        # Pages of files only grow while code and data are touched: those of now are at least those of the peak.
        return max(status["VmHWM"] - status["RssFile"], status["RssAnon"] + status["RssShmem"])
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(request: ProbeRequest) -> dict[str, Any]:
    """Run the parts of a run in their order, in a process that is there for it alone.

    Returns:
        the figures of a `ProbeResult`: `base_bytes`, the peaks of `phases`, `step_seconds`.
    Raises:
        MemoryError: the device has too little, or the plan takes more than its limit.
    """
    tune_malloc("small")  # As in a run, until the plan has chosen.
    device = devices.pick(request.config.run.device, request.local_rank)
    if request.limit_bytes and device.is_separate_memory:
        device.limit_memory(request.limit_bytes)
    try:
        return _measure_on(device, request)
    except Exception as error:
        if device.is_out_of_memory(error):
            raise MemoryError from error
        raise


def _measure_on(device: Device, request: ProbeRequest) -> dict[str, Any]:
    with suppress(OSError):  # Where memory runs out, this process goes first, and not the run that waits for it.
        Path("/proc/self/oom_score_adj").write_text("1000")
    if request.host_bytes:
        threading.Thread(target=stay_within, args=(request.host_bytes,), daemon=True).start()
    config = request.config
    Accelerator(cpu=device.name == "cpu")  # A run holds it too.
    use_threads(config.run.num_threads)
    cleaner = Cleaner(device)
    peaks = PhasePeaks(device)
    # Tokenizer and loaders are in memory as in a run, with its look at the lengths of rows.
    of_run = list[Any]()
    if request.data is not None:
        splits = request.data.train, request.data.validation
        train, validation = (
            StepLoader(split, request.data.objective, config.data, config.model, config.run.seed, request.data.reopens)
            for split in splits
        )
        # A run has measured the rate of products.
        torch.ones(PRODUCT_SIDE, PRODUCT_SIDE) @ torch.ones(PRODUCT_SIDE, PRODUCT_SIDE)
        step_lengths(train, request.data.train, range(1), len(request.steps[0]))
        evaluation_lengths(validation, config.train.eval_rows)
        of_run += [Tokenizer.load(request.data.tokenizer), train, validation]
    cleaner.before("load")
    restart_peak()
    base_bytes = 0 if device.is_separate_memory else peak_bytes()
    tune_malloc(request.choice.malloc)
    with peaks.phase("load"):
        if request.data and request.data.answers:
            of_run.append(AnswerTree.load(request.data.answers / TREE_FILE))
        engine = build(Beginning(config=config, device=device, base=request.base), request.choice)
        cleaner.settle()

    task = config.task
    has_reference = task.stores_reference(config.train, config.preference, config.lora)

    def batch_of(rows: MicroBatchRows, seed: int) -> Batch:
        """Rows of these source and target lengths with random ids."""
        batch: Batch = task.random_batch(rows, config.model, np.random.default_rng(seed), has_reference)
        return batch

    def evaluate(phase: str) -> None:
        cleaner.before("evaluation")
        with peaks.phase(phase):
            batch = batch_of(request.evaluation, 0)
            float(engine.blockwise.loss([to_micro_batch(batch, config.model, device.torch_device)]))

    evaluate("first evaluation")
    for number in range(1, max(LEAST_STEPS, len(request.steps)) + 1):
        with peaks.phase("first step" if number == 1 else "step"):
            start = time.perf_counter()
            micro_batches = request.steps[(number - 1) % len(request.steps)]
            batches = [batch_of(rows, number) for rows in micro_batches]
            step = Step(number, 1e-4, config.train.weight_decay, config.run.seed)
            engine.attempt(step, batches, sum(batch.num_labels for batch in batches))
            step_seconds = time.perf_counter() - start
    evaluate("evaluation")
    cleaner.before("samples")
    with peaks.phase("samples"):
        prompts = [[3] * source for source, _ in request.evaluation[: config.train.sample_rows]]
        if prompts and task.writes_text:
            weights = engine.blockwise.weight_store
            generate(
                engine.blockwise.model,
                prompts,
                max_new_tokens=SAMPLE_TOKENS,
                with_weights=weights.in_compute_dtype,
                compute_dtype=weights.compute_dtype,
            )
    del of_run
    return {"base_bytes": base_bytes, "phases": peaks.phases, "step_seconds": step_seconds}
