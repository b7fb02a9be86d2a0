"""What a plan speaks of: the machine, the work of a step, one way to run it, and how many weights are trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from devices.processor import AVX2, FAST_FACTOR
from devices.sizes import EVALUATION_ROWS, LIBRARIES_BYTES
from memory.estimate.blocks import NO_ADAPTERS, Adapted
from memory.estimate.precision import Precision
from memory.estimate.shapes import Shapes
from model import shapes
from model.shapes import Weight, block_weights, stacks_of, weight_counts, weights
from settings.declared import LoraConfig, T5ModelConfig
from settings.optimizers import OPTIMIZERS
from support.units import GIB, MIB


@dataclass(frozen=True)
class TrainedWeights:
    """How many weights are trained.

    Args:
        parts: part -> weights: "embedding"; "head" of either kind; "encoder" and "decoder", the widest block of each
            stack with its adapters; and "total".
        adapters: weights beside the model's own, in fp32.
        matrices: of the matrices of blocks.
        factors: rows and columns of all matrices, and numbers of vectors. shared_factors: those outside of the matrices
            of blocks.
        turn_flops: of one turn of Muon over the matrices of blocks.
    """

    parts: dict[str, int]
    adapters: int
    matrices: int
    factors: int
    shared_factors: int
    turn_flops: int

    @classmethod
    def of(cls, weights: Iterable[Weight]) -> TrainedWeights:
        """Count these weights."""
        parts = Counter[str](embedding=0, head=0, encoder=0, decoder=0, total=0)
        blocks = Counter[tuple[str, int]]()
        adapters = matrices = factors = shared_factors = turn_flops = 0
        for weight in weights:
            parts["total"] += weight.size
            factors += sum(weight.shape)
            if weight.stack is not None and weight.block is not None:
                blocks[weight.stack, weight.block] += weight.size
            elif weight.role == "embedding":
                parts["embedding"] += weight.size
            elif weight.role in HEAD_ROLES:
                parts["head"] += weight.size
            if weight.role == "adapter":
                adapters += weight.size
            if shapes.is_block_matrix(weight.name, weight.shape):
                matrices += weight.size
                # The square of the shorter side, its own product, and the product of the matrix with it.
                turn_flops += 4 * weight.size * min(weight.shape) + 2 * min(weight.shape) ** 3
            else:
                shared_factors += sum(weight.shape)
        for (stack, _), size in blocks.items():
            parts[stack] = max(parts[stack], size)
        return cls(dict(parts), adapters, matrices, factors, shared_factors, turn_flops)


def trained_counts(model: T5ModelConfig, lora: LoraConfig, freeze: str | None) -> TrainedWeights:
    """Count what is trained under `freeze` and `lora_rank`."""
    patterns = [word.strip() for word in (freeze or "").split(",") if word.strip()]
    trained = list(shapes.weights(model))
    if lora.lora_rank:
        trained = list(
            shapes.adapter_weights(model, lora.lora_rank, shapes.requested_targets(model, lora.lora_targets))
        )
        trained += shapes.token_row_weights(model, shapes.token_range(lora.lora_tokens))
        trained += shapes.label_head_weights(model)
    return TrainedWeights.of(
        weight
        for weight in trained
        if not any(shapes.matches_pattern(pattern, weight.name, weight.hf_name) for pattern in patterns)
    )


def adapted_by(model: T5ModelConfig, lora: LoraConfig) -> Adapted:
    """What the adapters that are asked for change of what a block saves."""
    if not lora.lora_rank:
        return NO_ADAPTERS
    return Adapted(tuple(shapes.requested_targets(model, lora.lora_targets)), lora.lora_dropout > 0)


HEAD_ROLES = ("head", "label head", "label bias")
BASE_BYTES = 206 * MIB  # Interpreter, libraries and data, where they cannot be measured.
# RAM of torch's compiler: 113 MiB when it is imported, the rest while it compiles with the compilers that it starts. A
# run on a CPU took 350 MiB more (torch 2.13); what Triton takes is a guess.
COMPILER_BYTES = 512 * MIB
COMPILED_BYTES = 26 * MIB  # Products in bf16 that oneDNN and torch keep compiled (`devices.environment`).
# Where the weights of blocks are while these do not run: on the device that computes, in the RAM beside it, or in a
# file.
DEVICE = "device"
RAM = "ram"
FILE = "file"
WEIGHTS_IN = (DEVICE, RAM, FILE)


@dataclass(frozen=True)
class Machine:
    """What the plan needs to know of a machine.

    Args:
        budget_bytes: what the process tree of one rank may take.
        available_bytes: what is free, for the old table of first guesses.
        installed_bytes: RAM of the whole machine, or the limit of its container where that is less; it decides the rows
            of a step.
        base_bytes: the process before the model is built, data and tokenizer loaded.
        rates: dtype name ("float32", "bfloat16") -> nominal FLOP/s of matrix products of such a machine: facts, which
            decide.
        speed_class: of what computes, see `memory.estimate.time`.
        measured: dtype name -> FLOP/s as measured here; for estimates of time alone, no choice may depend on it.
        num_processes: ranks that share the effective batch.
        libraries_bytes: what libraries take after the base is measured, on a GPU of its memory.
        pads_attention: whether it is a GPU, which forms many scores of attention at a time.
        fuses_attention: whether torch's fused attention computes (CUDA).
        widens_whole: whether a product widens a narrow head as a whole, as devices do; a CPU does so in pieces.
        correction: measured over predicted, of all temporary memory, where a probe has told it.
        has_kernels: whether compiled kernels are there, or can be made (`devices.kernels`).
        no_kernels: why there are none; on a GPU, those of `devices.pointwise`.
        no_compiler: why torch compiles no blocks there (`engine.compiled`); empty where it can.
        disk_rates: bytes a second that are read from and written to the disk: nominal.
        measured_disk: as measured here.
        device: what computes where that is not the CPU.
        has_own_memory: whether the budget is of memory beside the RAM.
        is_another: whether it is not this machine, whose disks tell nothing of it.
        host_bytes: RAM that weights may be moved to; 0: the device computes in the RAM itself, or cannot copy beside.
    """

    budget_bytes: int
    available_bytes: int
    base_bytes: int = BASE_BYTES
    rates: tuple[tuple[str, float], ...] = (("float32", 1e11), ("bfloat16", 1e11))
    num_processes: int = 1
    libraries_bytes: int = LIBRARIES_BYTES
    pads_attention: bool = False
    fuses_attention: bool = False
    widens_whole: bool = False
    host_bytes: int = 0
    correction: float = 1.0
    speed_class: str = AVX2.name
    measured: tuple[tuple[str, float], ...] = ()
    has_kernels: bool = False
    no_kernels: str = ""
    no_compiler: str = "torch compiles for NVIDIA GPUs and processors only"
    disk_rates: tuple[float, float] = (1e9, 5e8)
    measured_disk: tuple[float, float] | None = None
    is_another: bool = False
    device: str = ""
    has_own_memory: bool = False
    installed_bytes: int = 16 * GIB

    def rate(self, dtype: str) -> float:
        """Nominal FLOP/s of `dtype`, 0 where nothing trains in it."""
        return dict(self.rates).get(dtype, 0.0)

    def multiplies_fast(self, dtype: str) -> bool:
        """Whether products in a dtype of 16 bits pay here."""
        return self.rate(dtype) > FAST_FACTOR * self.rate("float32")

    def as_measured(self) -> Machine:
        """The same machine with the speeds that were measured, where they were: to tell times, never to choose."""
        measured = dict(self.measured)
        rates = tuple((dtype, measured.get(dtype, rate)) for dtype, rate in self.rates)
        return replace(self, rates=rates, disk_rates=self.measured_disk or self.disk_rates)


@dataclass(frozen=True)
class Workload:
    """What one step has to do: rows of the effective batch on this rank.

    Args:
        source_tokens, target_tokens: of the longest row.
        shapes: how long the rows of the run's steps are; None: all as long as the longest.
        evaluation: the same of evaluation's rows, as one step.
        sample_rows: answers written at the end.
        answers: decoder rows of one encoder row; their tokens count together.
        texts: of one row that are compared with those of other rows, on average; their tokens count together.
        trained: what is trained; None: all weights.
        adapted: what adapters change of what a block saves.
        steps: of the whole run; None: not known.
        mapped: of a frozen base the dtype that it is stored in, and how many of its weights may stay mapped from there.
    """

    model: T5ModelConfig
    rows: int
    source_tokens: int
    target_tokens: int
    dropout: bool
    optimizer: str
    hold_gradients: bool = False
    shapes: Shapes | None = None
    evaluation: Shapes | None = None
    sample_rows: int = 3
    answers: int = 1
    texts: float = 1.0
    trained: TrainedWeights | None = None
    adapted: Adapted = NO_ADAPTERS
    mapped: tuple[str, int] = ("", 0)
    steps: int | None = None

    @cached_property
    def learning(self) -> TrainedWeights:
        """What is trained: the weights asked for, or all."""
        return self.trained or TrainedWeights.of(weights(self.model))

    @property
    def learns(self) -> dict[str, int]:
        """Trained weights of embedding, head, the widest encoder and decoder block, and all; as `weight_counts`."""
        return self.learning.parts

    @cached_property
    def counts(self) -> dict[str, int]:
        """Weights of the parts of the model; as `weight_counts`."""
        return weight_counts(self.model)

    @cached_property
    def block_matrices(self) -> dict[str, list[tuple[int, ...]]]:
        """Shapes of the matrices of one block of each stack that there is."""
        return {
            stack: [weight.shape for weight in block_weights(self.model, stack) if weight.is_product]
            for stack in stacks_of(self.model)
        }

    @cached_property
    def step_shapes(self) -> Shapes:
        """Lengths of the rows of steps."""
        return self.shapes or Shapes.longest(self.rows, self.source_tokens, self.target_tokens)

    @cached_property
    def evaluation_shapes(self) -> Shapes:
        """Lengths of the rows of evaluation."""
        return self.evaluation or Shapes.longest(EVALUATION_ROWS, self.source_tokens, self.target_tokens)


@dataclass(frozen=True)
class ExecutionPlan:
    """One way to run a step.

    Args:
        batch_size_per_gpu: rows of a micro-batch.
        micro_batches_per_pass: those that go through a block together.
        accumulation_passes: of one step; more than one holds all gradients.
        saved_blocks: blocks whose activations are saved for backward; the others are recomputed.
        storage, compute: dtype names of the weights at rest and in products.
        malloc: one of `devices.sizes.MALLOCS`, see `devices.malloc`.
        source_sizes, target_sizes: what the tokens of a micro-batch are filled up to (`devices.sizes.filled_tokens`).
        kernels: whether compiled kernels compute where they can (`devices.kernels`).
        scores: elements of attention's scores that a GPU forms at a time (`devices.base`); 0: a CPU's tiles.
        weights_in: one of `WEIGHTS_IN`, where offloaded weights are kept.
        offloaded_blocks: blocks whose weights are kept there and brought to the device while the block runs.
        hold_gradients: whether all updates wait for the end of backward, as clipping and fp16 have them wait in any
            plan.
        compiled: whether torch compiles the blocks (`engine.compiled`).
    """

    batch_size_per_gpu: int
    micro_batches_per_pass: int
    accumulation_passes: int
    saved_blocks: int
    eval_batch_size_per_gpu: int
    storage: str
    compute: str
    loss_chunk_bytes: int
    malloc: str = "fast"
    source_sizes: tuple[int, ...] = ()
    target_sizes: tuple[int, ...] = ()
    kernels: bool = False
    scores: int = 0
    weights_in: str = "device"
    offloaded_blocks: int = 0
    hold_gradients: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        """Lists, as JSON gives them, become tuples."""
        for name in ("source_sizes", "target_sizes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What source and target tokens of a micro-batch are filled up to."""
        return self.source_sizes, self.target_sizes

    @property
    def precision(self) -> Precision:
        """Its dtypes, and the words for them."""
        return Precision.of(self.storage, self.compute)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step on one rank."""
        return self.micro_batches_per_pass * self.accumulation_passes


def state_bytes(work: Workload) -> int:
    """Bytes of the optimizer's state; the engine's own classes say the same, a test holds it."""
    learning = work.learning
    facts = OPTIMIZERS[work.optimizer]
    return facts.state_bytes(learning.parts["total"], learning.matrices, learning.factors, learning.shared_factors)
