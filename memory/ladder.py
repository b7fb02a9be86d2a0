"""The ladder: how a training step may save memory, the fastest rung first; `memory.plan` takes one.

A rung fixes what is kept and where. Within it a step is cut into micro-batches, and as many activations are kept, or as
few weights offloaded, as the budget asks: `families` lists these execution plans. Settings fix fields of all rungs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from devices.sizes import DEVICE_LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES
from memory.estimate.precision import FLOAT32, QUANTIZED, WORDS, Precision
from memory.estimate.workload import DEVICE, FILE, RAM, ExecutionPlan, Machine, Workload
from memory.step_settings import StepSettings
from memory.step_work import compiles_blocks, evaluation_batch, kernels_of, micro_batches, scores_of
from memory.weights_in import weights_in_to_try
from settings.fields import AUTO
from support.language import join, say

# Activations that are kept for the backward pass.
ALL = "keep all activations"
SOME = "recompute some blocks"
NONE = "recompute all blocks"
BY_FLAG: dict[bool | str, str] = {True: NONE, False: ALL}  # `gradient_checkpointing` stands over the mode.
BY_MODE = {"ultra": NONE, "standard": ALL}
# Dtypes of stored weights: what products are computed in, the narrower one beside it, or the narrowest, of a frozen
# base.
WIDE = "wide"
NARROW = "narrow"
NARROWEST = "narrowest"
# Freed memory is kept for the next step, or not; in tight memory the loss has smaller chunks, too, and malloc may keep
# nothing.
REUSED = "freed memory reused"
USUAL = "usual"
TIGHT = "smaller loss chunks"
MALLOCS = {REUSED: ("untrimmed",), USUAL: ("fast",), TIGHT: ("fast", "small")}
FULL = Precision.of(FLOAT32, FLOAT32)
SMALL_LOSS_CHUNK_BYTES = LOSS_CHUNK_BYTES // 4
# From this d_model on, memory that is kept for the next step saves no time. Measured on AVX2: steps of models 192 and
# 256 wide take 13 to 19% less time with it, those of 512 wide ones no less that could be measured.
REUSED_BELOW = 512


@dataclass(frozen=True)
class Rung:
    """One way of saving memory.

    Args:
        activations: ALL, SOME or NONE.
        weights: WIDE, NARROW or NARROWEST.
        memory: REUSED, USUAL or TIGHT.
        weights_in: where offloaded weights are kept, one of `WEIGHTS_IN`.
        precision: the dtypes that `weights` means for settings and machine.
    """

    activations: str
    weights: str = WIDE
    memory: str = USUAL
    weights_in: str = DEVICE
    precision: Precision = FULL

    @property
    def is_quantized(self) -> bool:
        """Whether its weights are stored in 8 or 4 bits."""
        return self.precision.storage in QUANTIZED

    def describe(self) -> str:
        """Its name, in words."""
        parts = [say(self.activations)]
        if self.weights != WIDE:
            parts.append(say("{dtype} weights", dtype=WORDS[self.precision.storage]))
        if self.memory != USUAL:
            parts.append(say(self.memory))
        if self.weights_in != DEVICE:
            parts.append(say("weights in RAM" if self.weights_in == RAM else "weights in a file"))
        return join(", ", parts)


LADDER = (
    Rung(ALL, memory=REUSED),
    Rung(ALL),
    Rung(ALL, NARROW),
    Rung(SOME),
    Rung(SOME, NARROW, TIGHT),
    Rung(NONE, NARROW, TIGHT),
    Rung(SOME, NARROWEST, TIGHT),
    Rung(NONE, NARROW, TIGHT, RAM),
    Rung(NONE, WIDE, USUAL, FILE),
    Rung(NONE, NARROW, TIGHT, FILE),
    Rung(NONE, NARROWEST, TIGHT, FILE),
)


class Ladder:
    """The rungs that settings and machine leave of `LADDER`, and the execution plans of each.

    Args:
        settings: what they fix of a step. work: of a step on one process.
        precision: dtypes that are decided already; None: those that settings and machine allow.
        running: the plan of a run that is under way, whose weights stay where they are; None: it may choose.
    """

    def __init__(
        self,
        settings: StepSettings,
        machine: Machine,
        work: Workload,
        precision: Precision | None = None,
        running: ExecutionPlan | None = None,
    ) -> None:
        self.work = work
        self.machine = machine
        self._settings = settings
        self._running = running
        self._num_blocks = work.model.num_layers + work.model.num_decoder_layers
        self._weights_in = (
            [running.weights_in]
            if running
            else weights_in_to_try(settings.weights_in, settings.weights_folder, machine)
        )
        allowed = [precision] if precision else settings.precisions(machine.multiplies_fast)
        exact = [each for each in allowed if each.storage not in QUANTIZED] or allowed
        dtypes = {WIDE: exact[0], NARROW: exact[-1], NARROWEST: allowed[-1]}
        mode = settings.memory_mode
        can_reuse = work.model.d_model < REUSED_BELOW and not machine.pads_attention and mode in (AUTO, "standard")
        activations = BY_FLAG.get(settings.gradient_checkpointing, BY_MODE.get(mode))
        weights_in = self._weights_in[0] if running or settings.weights_in != AUTO else None
        self.rungs = list[Rung]()
        for row in LADDER:
            rung = replace(
                row,
                activations=activations or row.activations,
                # The widest name of its dtypes, so that no rung comes twice.
                weights=next(name for name in dtypes if dtypes[name] == dtypes[row.weights]),
                weights_in=weights_in or row.weights_in,
                precision=dtypes[row.weights],
            )
            is_possible = rung.memory != REUSED or (can_reuse and rung.activations == ALL)
            if is_possible and rung.weights_in in self._weights_in and rung not in self.rungs:
                self.rungs.append(rung)
        self._families = cache(lambda rung: list(self._cut(rung)))

    def families(self, rung: Rung) -> list[list[ExecutionPlan]]:
        """Its execution plans: a list for each way to cut the step, from the fastest plan to the one that takes the
        least.

        Lists of small micro-batches come first.
        """
        return self._families(rung)

    def _cut(self, rung: Rung) -> Iterator[list[ExecutionPlan]]:
        shapes = self.work.step_shapes
        loss_chunk_bytes = DEVICE_LOSS_CHUNK_BYTES if self.machine.pads_attention else LOSS_CHUNK_BYTES
        if rung.memory == TIGHT:
            loss_chunk_bytes = SMALL_LOSS_CHUNK_BYTES
        saved_blocks = {ALL: [self._num_blocks], SOME: range(self._num_blocks, -1, -1), NONE: [0]}[rung.activations]
        for rows in micro_batches(self._settings, self.work.rows):
            num_micro_batches = shapes.count(rows)
            source_sizes, target_sizes = shapes.sizes(rows)
            passes = [number for number in range(1, num_micro_batches + 1) if num_micro_batches % number == 0]
            if self.work.model.gives_vectors:  # The loss compares all rows of a step.
                passes = passes[:1]
            for accumulation_passes, malloc in product(passes, MALLOCS[rung.memory]):
                plan = ExecutionPlan(
                    batch_size_per_gpu=rows,
                    micro_batches_per_pass=num_micro_batches // accumulation_passes,
                    accumulation_passes=accumulation_passes,
                    saved_blocks=0,
                    eval_batch_size_per_gpu=evaluation_batch(self._settings, self.machine, rows),
                    storage=rung.precision.storage,
                    compute=rung.precision.compute,
                    loss_chunk_bytes=loss_chunk_bytes,
                    malloc=malloc,
                    source_sizes=source_sizes,
                    target_sizes=target_sizes,
                    kernels=kernels_of(self._settings.compiled_kernels, self.machine),
                    scores=scores_of(self.machine),
                )
                plan = replace(plan, compiled=self._compiles(plan))
                offloaded = self._offloaded(plan, rung.weights_in)
                yield [replace(each, saved_blocks=saved) for each, saved in product(offloaded, saved_blocks)]

    def _compiles(self, plan: ExecutionPlan) -> bool:
        if self._running is not None:
            return self._running.compiled
        return compiles_blocks(self._settings.compile, self.machine, self.work, plan)

    def _offloaded(self, plan: ExecutionPlan, weights_in: str) -> list[ExecutionPlan]:
        """The same plan with weights kept there, of as few blocks as settings allow first."""
        counts = list(range(1, self._num_blocks + 1))
        if weights_in == DEVICE:
            counts = [0]
        elif self._running is not None:
            counts = [self._running.offloaded_blocks]
        elif self._settings.weights_in != AUTO:
            counts = [self._num_blocks]
        return [
            replace(plan, weights_in=weights_in, offloaded_blocks=count, compiled=plan.compiled and not count)
            for count in counts
        ]

    def as_before(self, plan: ExecutionPlan) -> Iterator[list[ExecutionPlan]]:
        """Families of the plan that a run had before: it computes alike wherever its weights are kept."""
        mallocs = ("untrimmed", "fast") if plan.malloc == "untrimmed" else (plan.malloc,)
        for weights_in, malloc in product(self._weights_in, mallocs):
            yield self._offloaded(replace(plan, malloc=malloc, hold_gradients=False), weights_in)
