"""What do the worst steps of a plan really take? The child process of `memory.probe`; it writes no file.

The same parts as in a run, made by the same function, see rows of the planned lengths with random ids: load, evaluation,
the steps (with the optimizer's state from the second on), evaluation again, and a few answers. The peak of each phase is
the kernel's own, or the device's. A budget that is overrun may kill this process; the run itself is not touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

import devices
from config import PREFERENCES
from data.batches.collate import Batch, PreferenceRow, Row, collate, collate_preferences
from data.batches.loader import StepLoader
from data.batches.step_lengths import evaluation_lengths, step_lengths
from data.tokenizers.tokenizer import Tokenizer
from devices.cores import use_threads
from devices.malloc import tune_malloc
from engine.micro_batches import to_micro_batch
from engine.optimizers import Step
from limits import SAMPLE_TOKENS
from memory.cleanup import Cleaner
from memory.cost.shapes import MicroBatchRows
from memory.observe.high_water import HighWater
from memory.probe import ProbeData, ProbeRequest
from model.decoding.generation import generate
from training.checkpoints.state import TrainingState
from training.start.building import build, stores_reference
from training.start.startup import Start

PRODUCT_SIDE = 512  # large enough for the library of products to take its buffers
LEAST_STEPS = 4  # the optimizer's state is made in the first, and the heap settles after the third


class Probe:
    """The parts of a run, and the peaks of its phases.

    Args:
        request: what shall be run.
    """

    def __init__(self, request: ProbeRequest) -> None:
        self.request = request
        tune_malloc("small")  # as a run, until the plan has chosen
        self.device = devices.pick(request.config.run.device, request.local_rank)
        Accelerator(cpu=self.device.name == "cpu")  # a run holds it too
        use_threads(request.config.run.num_threads)
        self.high_water = HighWater()
        self.phases: dict[str, int] = {}
        self.step_seconds = 0.0

    def run(self) -> dict[str, Any]:
        """Everything in the order of a run; gives `base_bytes`, `phases` and `step_seconds`."""
        request, cleaner = self.request, Cleaner(self.device)
        data = None if request.data is None else self._read(request.data)
        cleaner.before("load")
        self.high_water.restart()
        base = 0 if self.device.is_separate_memory else self.high_water.peak_bytes()
        tune_malloc(request.choice.malloc)
        with self._phase("load"):
            self._build()
            cleaner.settle()
        cleaner.before("evaluation")
        self._evaluate("first evaluation")
        for number in range(1, max(LEAST_STEPS, len(request.steps)) + 1):
            with self._phase("first step" if number == 1 else "step"):
                self._step(number)
        cleaner.before("evaluation")
        self._evaluate("evaluation")
        with self._phase("samples"):
            self._write_samples()
        del data
        return {"base_bytes": base, "phases": self.phases, "step_seconds": self.step_seconds}

    def _read(self, data: ProbeData) -> list[Any]:
        """Tokenizer and loaders as the run holds them, its look at the lengths of rows included."""
        config = self.request.config
        train, validation = (
            StepLoader(split, data.objective, config, data.reopens) for split in (data.train, data.validation)
        )
        torch.ones(PRODUCT_SIDE, PRODUCT_SIDE) @ torch.ones(PRODUCT_SIDE, PRODUCT_SIDE)  # a run has measured its rate
        step_lengths(train, data.train, range(1), len(self.request.steps[0]))
        evaluation_lengths(validation, config.train.eval_rows)
        return [Tokenizer.load(data.tokenizer), train, validation]

    def _build(self) -> None:
        request = self.request
        # data and tokenizer are not needed to make a model
        start = cast(Any, Start)(
            request.config, None, None, None, None, request.base, TrainingState(), is_resumed=False, notes=[]
        )
        self.engine = build(start, request.choice, self.device)

    def _step(self, number: int) -> None:
        request, engine = self.request, self.engine
        began = time.perf_counter()
        batches = [self._batch(rows, number) for rows in request.steps[(number - 1) % len(request.steps)]]
        labels = sum(batch.num_labels for batch in batches)
        engine.update.begin(Step(number, 1e-4, request.config.train.weight_decay, request.config.run.seed))
        engine.attempt(batches, labels)
        self.step_seconds = time.perf_counter() - began

    def _evaluate(self, phase: str) -> None:
        with self._phase(phase):
            batch = self._batch(self.request.evaluation, 0)
            shape, device = self.request.config.model, self.device.torch_device
            float(self.engine.walk.loss([to_micro_batch(batch, shape, device)]))

    def _write_samples(self) -> None:
        count, walk = self.request.config.train.sample_rows, self.engine.walk
        rows = [[3] * source for source, _ in self.request.evaluation[:count]]
        if rows:
            generate(
                walk.model, rows, max_new_tokens=SAMPLE_TOKENS,
                with_weights=walk.weight_store.in_compute_dtype, compute_dtype=walk.weight_store.compute_dtype,
            )  # fmt: skip

    def _batch(self, rows: MicroBatchRows, seed: int) -> Batch:
        config, draw = self.request.config, np.random.default_rng(seed)
        pad, most = config.model.pad_token_id, max(3, config.model.vocab_size)
        keys = draw.integers(2**62, size=len(rows)).tolist()

        def tokens(count: int) -> NDArray[np.int64]:
            return draw.integers(2, most, count)

        if config.data.objective != PREFERENCES:
            places = zip(rows, keys, strict=True)
            return collate([Row(tokens(source), tokens(target), key) for (source, target), key in places], pad)
        known = np.zeros(2, np.float32) if stores_reference(config) else None
        pairs = [
            PreferenceRow(tokens(source), tokens(both - both // 2), tokens(both // 2), key, known)
            for (source, both), key in zip(rows, keys, strict=True)
        ]
        return collate_preferences(pairs, pad)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.high_water.restart()
        self.device.reset_peak()
        try:
            yield
        finally:
            host = 0 if self.device.is_separate_memory else self.high_water.peak_bytes()  # else one budget holds both
            peak = host + self.device.memory_peak_bytes()
            self.phases[name] = max(peak, self.phases.get(name, 0))


def measure(request: ProbeRequest) -> dict[str, Any]:
    """What `Probe.run` gives, in a process that is there for it alone."""
    with suppress(OSError):  # where memory runs out, this process goes first, and not the run that waits for it
        Path("/proc/self/oom_score_adj").write_text("1000")
    return Probe(request).run()
