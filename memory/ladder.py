"""The ladder: how a training step may save memory, the fastest rung first; `memory.plan` takes the first that fits.

A rung fixes what is kept and where. Within it a step is cut into micro-batches, and as many activations are kept, or as few
weights offloaded, as the budget asks: `families` lists these execution plans. Settings fix fields of all rungs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from language import join, say
from limits import DEVICE_LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES
from memory.batch_size import evaluation_batch, micro_batches
from memory.estimate.precision import QUANTIZED, WORDS, Precision, precisions
from memory.estimate.workload import DEVICE, FILE, RAM, ExecutionPlan, Machine, Workload
from memory.step_work import kernels_of, scores_of
from memory.weights_in import WeightOffload, weights_in_to_try
from settings.declared import Config
from settings.fields import AUTO

# Activations that are kept for the backward pass.
ALL, SOME, NONE = "keep all activations", "recompute some blocks", "recompute all blocks"
# Dtypes of stored weights: what products are computed in, the narrower one beside it, or the narrowest, of a frozen base.
WIDE, NARROW, NARROWEST = "wide", "narrow", "narrowest"
SMALL_LOSS_CHUNK_BYTES = LOSS_CHUNK_BYTES // 4
# From this d_model on, memory that is kept for the next step saves no time. Measured on AVX2: steps of models 192 and 256 wide
# take 13 to 19% less time with it, those of 512 wide ones no less that could be measured.
UNTRIMMED_BELOW = 512


@dataclass(frozen=True)
class Rung:
    """One way of saving memory.

    Args:
        activations: ALL, SOME or NONE.
        weights: WIDE, NARROW or NARROWEST.
        is_tight: whether the loss is formed in smaller chunks and, as the last means, freed memory returned at once.
        weights_in: where offloaded weights are kept.
        reuses_memory: whether freed memory is kept for the next step.
        is_last_resort: whether smaller micro-batches on any rung above come before it.
    """

    activations: str
    weights: str = WIDE
    is_tight: bool = False
    weights_in: str = DEVICE
    reuses_memory: bool = False
    is_last_resort: bool = False

    @property
    def mallocs(self) -> tuple[str, ...]:
        """Tunings of malloc that it may take, the fastest first."""
        if self.reuses_memory:
            return ("untrimmed",)
        return ("fast", "small") if self.is_tight else ("fast",)

    def describe(self, storage: str) -> str:
        """Its name in words, with weights stored in this dtype."""
        parts = [say(self.activations)]
        if self.weights != WIDE:
            parts.append(say("{dtype} weights", dtype=WORDS[storage]))
        if self.is_tight:
            parts.append(say("smaller loss chunks"))
        if self.reuses_memory:
            parts.append(say("freed memory reused"))
        if self.weights_in != DEVICE:
            parts.append(say("weights in RAM" if self.weights_in == RAM else "weights in a file"))
        return join(", ", parts)


LADDER = (
    Rung(ALL, reuses_memory=True),
    Rung(ALL),
    Rung(ALL, NARROW),
    Rung(SOME),
    Rung(SOME, NARROW, is_tight=True),
    Rung(NONE, NARROW, is_tight=True),
    Rung(SOME, NARROWEST, is_tight=True, is_last_resort=True),
    Rung(NONE, NARROW, is_tight=True, weights_in=RAM, is_last_resort=True),
    Rung(NONE, weights_in=FILE, is_last_resort=True),
    Rung(NONE, NARROW, is_tight=True, weights_in=FILE, is_last_resort=True),
    Rung(NONE, NARROWEST, is_tight=True, weights_in=FILE, is_last_resort=True),
)


class Ladder:
    """The rungs that settings and machine leave of `LADDER`, and the execution plans of each.

    Args:
        work: of a step on one process.
        precision: dtypes that are decided already; None: those that settings and machine allow.
        offload: where weights are kept already; None: where settings and machine allow.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        work: Workload,
        precision: Precision | None = None,
        offload: WeightOffload | None = None,
    ) -> None:
        self.work = work
        self._config = config
        self.machine = machine
        self._offload = offload
        self._num_blocks = work.model.num_layers + work.model.num_decoder_layers
        self._precisions = [precision] if precision else precisions(config, machine.multiplies_fast)
        self._weights_in = weights_in_to_try(config, machine, offload)
        self.rungs = self._allowed()
        self._families = dict[Rung, list[list[ExecutionPlan]]]()

    def precision_of(self, rung: Rung) -> Precision:
        """The dtypes of its weights and products."""
        exact = [precision for precision in self._precisions if precision.storage not in QUANTIZED]
        if rung.weights == NARROWEST or not exact:
            return self._precisions[-1]
        return exact[0] if rung.weights == WIDE else exact[-1]

    def describe(self, rung: Rung) -> str:
        """The name of a rung, in words."""
        return rung.describe(self.precision_of(rung).storage)

    def families(self, rung: Rung) -> list[list[ExecutionPlan]]:
        """Its execution plans: a list for each way to cut the step, from the fastest plan to the one that takes the least."""
        if rung not in self._families:
            self._families[rung] = list(self._cut(rung))
        return self._families[rung]

    def _cut(self, rung: Rung) -> Iterator[list[ExecutionPlan]]:
        config = self._config
        machine = self.machine
        shapes = self.work.step_shapes
        precision = self.precision_of(rung)
        loss_chunk_bytes = DEVICE_LOSS_CHUNK_BYTES if machine.pads_attention else LOSS_CHUNK_BYTES
        if rung.is_tight:
            loss_chunk_bytes = SMALL_LOSS_CHUNK_BYTES
        saved_blocks = {ALL: [self._num_blocks], SOME: range(self._num_blocks, -1, -1), NONE: [0]}[rung.activations]
        for rows in micro_batches(config, self.work.rows):
            num_micro_batches = shapes.count(rows)
            source_sizes, target_sizes = shapes.sizes(rows)
            passes = [number for number in range(1, num_micro_batches + 1) if num_micro_batches % number == 0]
            for accumulation_passes, malloc in product(passes, rung.mallocs):
                plan = ExecutionPlan(
                    batch_size_per_gpu=rows,
                    micro_batches_per_pass=num_micro_batches // accumulation_passes,
                    accumulation_passes=accumulation_passes,
                    saved_blocks=0,
                    eval_batch_size_per_gpu=evaluation_batch(config, machine, rows),
                    storage=precision.storage,
                    compute=precision.compute,
                    loss_chunk_bytes=loss_chunk_bytes,
                    malloc=malloc,
                    source_sizes=source_sizes,
                    target_sizes=target_sizes,
                    kernels=kernels_of(config, machine),
                    scores=scores_of(machine),
                )
                offloaded = self.offloaded(plan, rung.weights_in)
                yield [replace(each, saved_blocks=saved) for each, saved in product(offloaded, saved_blocks)]

    def offloaded(self, plan: ExecutionPlan, weights_in: str) -> list[ExecutionPlan]:
        """The same plan with weights kept there, of as few blocks as settings allow first."""
        if weights_in == DEVICE:
            return [replace(plan, weights_in=DEVICE, offloaded_blocks=0)]
        counts = list(range(1, self._num_blocks + 1))
        if self._offload is not None:
            counts = [self._offload.offloaded_blocks]
        elif self._config.memory.weights_in != AUTO:
            counts = [self._num_blocks]
        return [replace(plan, weights_in=weights_in, offloaded_blocks=count) for count in counts]

    def as_before(self, plan: ExecutionPlan) -> Iterator[list[ExecutionPlan]]:
        """Families of the plan that a run had before: it computes alike wherever its weights are kept."""
        mallocs = ("untrimmed", "fast") if plan.malloc == "untrimmed" else (plan.malloc,)
        for weights_in in self._weights_in:
            for malloc in mallocs:
                yield self.offloaded(replace(plan, malloc=malloc), weights_in)

    def _allowed(self) -> list[Rung]:
        """The rungs of the table with fields that settings fix, without those that are not possible or come twice."""
        rungs = dict[Rung, Rung]()
        for rung in map(self._with_settings, LADDER):
            if self._is_possible(rung):
                rungs.setdefault(replace(rung, is_last_resort=False), rung)
        return list(rungs.values())

    def _is_possible(self, rung: Rung) -> bool:
        can_reuse = (
            rung.activations == ALL
            and self._config.model.d_model < UNTRIMMED_BELOW
            and not self.machine.pads_attention
            and self._config.memory.memory_mode in (AUTO, "standard")
        )
        return rung.weights_in in self._weights_in and (can_reuse or not rung.reuses_memory)

    def _with_settings(self, rung: Rung) -> Rung:
        memory = self._config.memory
        if memory.gradient_checkpointing is True or memory.memory_mode == "ultra":
            rung = replace(rung, activations=NONE)
        elif memory.gradient_checkpointing is False or memory.memory_mode == "standard":
            rung = replace(rung, activations=ALL)
        if self._offload is not None or memory.weights_in != AUTO:
            rung = replace(rung, weights_in=self._weights_in[0])
        for weights in (NARROW, WIDE):
            wider = replace(rung, weights=weights)
            if self.precision_of(wider) == self.precision_of(rung):
                rung = wider
        return rung
