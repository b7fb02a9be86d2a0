"""The child process of `memory.probe`, which runs a plan's largest steps; it writes no file.

The same parts as in a run, made by the same function, see rows of the planned lengths with random ids: load, evaluation,
the steps (with the optimizer's state from the second on), evaluation again, and a few answers. The peak of each phase is
the kernel's own, or the device's. A budget that is overrun ends this process; the run itself is not touched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

import devices
from childproc import stay_within
from data.batches.collate import Batch, LabelledRow, PreferenceRow, Row, collate, collate_labels, collate_preferences
from data.batches.loader import StepLoader
from data.batches.step_lengths import evaluation_lengths, step_lengths
from data.tokenizers.tokenizer import Tokenizer
from devices.base import Device
from devices.malloc import tune_malloc
from devices.threads import use_threads
from engine.optimizers import Step
from engine.step import to_micro_batch
from limits import SAMPLE_TOKENS
from memory.cleanup import Cleaner
from memory.estimate.shapes import MicroBatchRows
from memory.observe import high_water
from memory.probe import ProbeData, ProbeRequest
from model.decoding.answer_tree import AnswerTree
from model.decoding.generation import generate
from settings.consistency import PREFERENCES, TOKEN
from settings.declared import Config
from training.setup.answer_list import TREE_FILE
from training.setup.build import build, stores_reference
from training.setup.resolved import ResolvedRun

PRODUCT_SIDE = 512  # large enough for the library of products to take its buffers
LEAST_STEPS = 4  # the optimizer's state is made in the first, and the heap settles after the third


def measure(request: ProbeRequest) -> dict[str, Any]:
    """The parts of a run in their order, in a process that is there for it alone: `base_bytes`, the peaks of `phases`, `step_seconds`.

    Raises:
        MemoryError: the device has too little, or the plan takes more than its limit.
    """
    tune_malloc("small")  # as a run, until the plan has chosen
    device = devices.pick(request.config.run.device, request.local_rank)
    if request.limit_bytes and device.is_separate_memory:
        device.limit_memory(request.limit_bytes)
    try:
        return _measure(request, device)
    except Exception as error:
        if device.is_out_of_memory(error):
            raise MemoryError from error
        raise


def _measure(request: ProbeRequest, device: Device) -> dict[str, Any]:
    with suppress(OSError):  # where memory runs out, this process goes first, and not the run that waits for it
        Path("/proc/self/oom_score_adj").write_text("1000")
    if request.host_bytes:
        threading.Thread(target=stay_within, args=(request.host_bytes,), daemon=True).start()
    config, choice = request.config, request.choice
    Accelerator(cpu=device.name == "cpu")  # a run holds it too
    use_threads(config.run.num_threads)
    cleaner = Cleaner(device)
    phases: dict[str, int] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        high_water.restart()
        device.reset_peak()
        try:
            yield
        finally:
            host = 0 if device.is_separate_memory else high_water.peak_bytes()  # else one budget holds both
            phases[name] = max(host + device.memory_peak_bytes(), phases.get(name, 0))

    def evaluate(name: str) -> None:
        cleaner.before("evaluation")
        with phase(name):
            batch = _batch(config, request.evaluation, 0)
            float(engine.blockwise.loss([to_micro_batch(batch, config.model, device.torch_device)]))

    data = None if request.data is None else _read(request, request.data)
    cleaner.before("load")
    high_water.restart()
    base = 0 if device.is_separate_memory else high_water.peak_bytes()
    tune_malloc(choice.malloc)
    with phase("load"):
        run = ResolvedRun(config, base=request.base)
        run.device = device
        if request.data is not None and request.data.answers is not None:
            run.tree = AnswerTree.load(request.data.answers / TREE_FILE)
        engine = build(run, choice)
        cleaner.settle()
    evaluate("first evaluation")
    for number in range(1, max(LEAST_STEPS, len(request.steps)) + 1):
        with phase("first step" if number == 1 else "step"):
            began = time.perf_counter()
            batches = [_batch(config, rows, number) for rows in request.steps[(number - 1) % len(request.steps)]]
            step = Step(number, 1e-4, config.train.weight_decay, config.run.seed)
            engine.attempt(step, batches, sum(batch.num_labels for batch in batches))
            step_seconds = time.perf_counter() - began
    evaluate("evaluation")
    cleaner.before("samples")
    with phase("samples"):
        blockwise = engine.blockwise
        rows = [[3] * source for source, _ in request.evaluation[: config.train.sample_rows]]
        if rows and config.model.is_text:
            generate(
                blockwise.model, rows, max_new_tokens=SAMPLE_TOKENS,
                with_weights=blockwise.weight_store.in_compute_dtype, compute_dtype=blockwise.weight_store.compute_dtype,
            )  # fmt: skip
    del data
    return {"base_bytes": base, "phases": phases, "step_seconds": step_seconds}


def _read(request: ProbeRequest, data: ProbeData) -> list[Any]:
    """Tokenizer and loaders as the run holds them, its look at the lengths of rows included."""
    config = request.config
    train, validation = (
        StepLoader(split, data.objective, config, data.reopens) for split in (data.train, data.validation)
    )
    torch.ones(PRODUCT_SIDE, PRODUCT_SIDE) @ torch.ones(PRODUCT_SIDE, PRODUCT_SIDE)  # a run has measured its rate
    step_lengths(train, data.train, range(1), len(request.steps[0]))
    evaluation_lengths(validation, config.train.eval_rows)
    return [Tokenizer.load(data.tokenizer), train, validation]


def _batch(config: Config, rows: MicroBatchRows, seed: int) -> Batch:
    """Rows of these lengths with random ids."""
    draw = np.random.default_rng(seed)
    pad, most = config.model.pad_token_id, max(3, config.model.vocab_size)
    keys = draw.integers(2**62, size=len(rows)).tolist()

    def tokens(count: int) -> NDArray[np.int64]:
        return draw.integers(2, most, count)

    if not config.model.is_text:
        has_classes, is_token = bool(config.model.label_names), config.model.head == TOKEN
        made = []
        for (source, target), key in zip(rows, keys, strict=True):
            count = source if is_token else 1
            labels = draw.integers(0, 2, count) if has_classes else draw.random(count, np.float32)
            made.append(LabelledRow(tokens(source), labels, key, target > 0))
        return collate_labels(made, pad)
    if config.data.objective != PREFERENCES:
        places = zip(rows, keys, strict=True)
        return collate([Row(tokens(source), tokens(target), key) for (source, target), key in places], pad)
    known = np.zeros(2, np.float32) if stores_reference(config) else None
    pairs = [
        PreferenceRow(tokens(source), tokens(both - both // 2), tokens(both // 2), key, known)
        for (source, both), key in zip(rows, keys, strict=True)
    ]
    return collate_preferences(pairs, pad)
