"""How a model is held while it answers, and what answering so many rows takes.

A model is held by the first of `rungs` that fits: in the dtype that is computed fastest, in narrower ones, at last with
weights in a file. What is held at the highest is one formula for all work: what stands all the time, what comes and
goes, and a share of the latter that malloc keeps. So many rows are taken together as are the `largest` number that
fits.

Shapes: B rows, G beams of each, S source tokens, T tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from devices.sizes import ENCODER_TOKENS, HEAP_BELOW, LOSS_CHUNK_BYTES, TILE_ELEMENTS
from memory.budget import Budget
from memory.estimate.peaks import evaluation_parts
from memory.estimate.precision import BFLOAT16, COMPUTE_DTYPES, FLOAT16, FLOAT32, INT8, dtype_bytes
from memory.estimate.shapes import Shapes
from memory.estimate.weight_offload import resident_bytes, slots_bytes
from memory.estimate.workload import COMPILED_BYTES, DEVICE, FILE, ExecutionPlan, Machine, Workload
from memory.processes import ProcessTree
from model.shapes import inner_width
from settings.declared import GenerateConfig, T5ModelConfig
from settings.errors import DoesNotFit
from settings.fields import AUTO, counted
from support.language import join, say
from support.units import MIB, format_size, typed_size

DTYPES = (FLOAT32, BFLOAT16, INT8)  # Weights at rest, from the fastest to the smallest.
# The least work may take this share of the budget with malloc "fast": gaps between tensors of prompts of many lengths
# make the heap grow by a tenth over some dozens of them.
FAST_SHARE = 0.8
LIBRARIES_BYTES = 8 * MIB  # Libraries at the first products, and small objects of Python.
WIDENED_BYTES = 4 * MIB  # Pieces of narrow weights that a CPU widens.
SLACK = 0.2  # Malloc keeps this share of what comes and goes.
GAPS_BYTES = 8 * HEAP_BELOW  # Malloc "fast" keeps at most so many bytes in gaps of the heap.
MARGIN = 0.02  # The same work takes so much more in one run than in another.
CHOICE_BYTES = 48  # A token that a list of answers allows: id and position on host and device, and score.


@dataclass(frozen=True)
class AnswerBatch:
    """Answers that are written at once.

    Args:
        rows: B. source_tokens: S of the longest prompt. new_tokens: T of the longest answer. beams: G.
        sampled: whether tokens are drawn from the best, for which scores are sorted.
        choices: most tokens that a list of answers allows next; 0: there is no list.
    """

    rows: int
    source_tokens: int
    new_tokens: int
    beams: int = 1
    sampled: bool = False
    choices: int = 0

    @classmethod
    def by(cls, settings: GenerateConfig, rows: int, source_tokens: int) -> AnswerBatch:
        """Rows of prompts of so many tokens, answered by these settings."""
        is_sorted = settings.temperature > 0.0 and (settings.top_k > 0 or settings.top_p < 1.0)
        return cls(rows, source_tokens, settings.max_new_tokens, settings.num_beams, is_sorted)


@dataclass(frozen=True)
class HeldModel:
    """A model in memory. Its methods predict what work with it holds at the highest: component -> bytes.

    Args:
        shape: of the model.
        plan: dtypes of weights and products, malloc's tuning, and which weights are offloaded.
        base_bytes: what the process holds beside the model.
    """

    shape: T5ModelConfig
    plan: ExecutionPlan
    base_bytes: int

    @classmethod
    def of(cls, shape: T5ModelConfig, storage: str, compute: str, base_bytes: int) -> HeldModel:
        """A model with all weights in memory, in these dtypes, on a CPU without compiled kernels.

        Args:
            storage: of weights; those dtypes of folders that nothing computes in are loaded as fp32. compute: of
                products.
        """
        loaded = storage if storage in (*COMPUTE_DTYPES, INT8) else FLOAT32
        return cls(shape, ExecutionPlan(1, 1, 1, 0, 1, loaded, compute, LOSS_CHUNK_BYTES, "small"), base_bytes)

    @cached_property
    def weight_bytes(self) -> int:
        """All weights that are in memory."""
        work = Workload(self.shape, 1, 1, 1, dropout=False, optimizer="adafactor")
        return resident_bytes(work, self.plan) + slots_bytes(work, self.plan, Machine(0, 0))

    def answering(
        self, batch: AnswerBatch, rows_read: int | None = None, cached_tokens: int | None = None
    ) -> dict[str, int]:
        """Writing answers: highest while prompts pass through the encoder, or in a step of all rows.

        Args:
            rows_read: prompts that are read together; None: all.
            cached_tokens: that keys and values are held of; None: of the longest prompt and answer of each row.
        """
        tokens = cached_tokens or batch.rows * (batch.source_tokens + batch.beams * batch.new_tokens)
        # Where rows leave and where a buffer of keys or of values grows, one buffer at a time is there twice.
        buffer = tokens * inner_width(self.shape) * dtype_bytes(self.plan.compute)
        rows = min(rows_read or batch.rows, max(1, ENCODER_TOKENS // batch.source_tokens))
        passing = {
            "encoder": self._forward(rows, batch.source_tokens, 0)["one block"],
            "logits": buffer + self._step_bytes(batch),
        }
        highest = max(passing, key=passing.__getitem__)
        cache = 2 * self.shape.num_decoder_layers * buffer
        return self.peak({highest: passing[highest]}, {"keys and values": cache})

    def measuring(self, rows: int, source_tokens: int, target_tokens: int) -> dict[str, int]:
        """Measuring the loss of a batch with such a longest row; without a target the encoder alone reads."""
        return self.peak(self._forward(rows, source_tokens, target_tokens))

    def peak(self, passing: dict[str, int], lasting: dict[str, int] | None = None) -> dict[str, int]:
        """Everything that is held while this comes and goes.

        Args:
            lasting: what is held as long as the work lasts.
        """
        size = sum(passing.values())
        cast = self._forward(1, 1, 1)["weights in compute dtype"]
        parts = {
            "base": self.base_bytes,
            "libraries": LIBRARIES_BYTES + COMPILED_BYTES * (self.plan.compute == BFLOAT16),
            "weights": self.weight_bytes,
            "weights in compute dtype": cast if self.plan.scores else min(cast, WIDENED_BYTES),
            **(lasting or {}),
            **passing,
        }
        gaps = 0 if self.plan.malloc == "small" else min(size, GAPS_BYTES)
        return parts | {"allocator slack": int(max(SLACK * size, gaps) + MARGIN * sum(parts.values()))}

    def _forward(self, rows: int, source_tokens: int, target_tokens: int) -> dict[str, int]:
        """What comes and goes while a batch passes through the model; without a target through the encoder."""
        shape = self.shape if target_tokens else replace(self.shape, num_decoder_layers=0, head="none")
        shapes = Shapes.longest(rows, source_tokens, target_tokens)
        work = Workload(shape, rows, source_tokens, target_tokens, False, "adafactor", evaluation=shapes)
        return evaluation_parts(work, replace(self.plan, eval_batch_size_per_gpu=rows), Machine(0, 0))

    def _step_bytes(self, batch: AnswerBatch) -> int:
        """Scores and weights of a tile of attention, the masks of beams, and the logits (B G, V) in fp32.

        Of the logits log-probabilities are made, or sorted scores with their positions and probabilities.
        """
        answers = batch.rows * batch.beams
        row = batch.beams * self.shape.num_heads * max(batch.source_tokens, batch.beams * batch.new_tokens)
        tile = 2 * dtype_bytes(self.plan.compute) * max(row, min(TILE_ELEMENTS, batch.rows * row))
        masks = 2 * answers * batch.beams * batch.new_tokens
        logits = answers * self.shape.vocab_size * (4 + (17 if batch.sampled else 4))
        return tile + masks + logits + CHOICE_BYTES * answers * batch.choices


def storage_dtypes(folder_dtype: str, compute: str, requested: str) -> list[str]:
    """Dtypes in which weights may be held, the fastest first; rounding ones only where the user names none.

    Args:
        folder_dtype: in the model's folder. compute: of products. requested: `mixed_precision`.
    """
    if folder_dtype == INT8:
        return [INT8]
    if compute == FLOAT16:
        return [FLOAT16]
    widest = BFLOAT16 if requested == "bf16" else compute
    narrower = DTYPES[DTYPES.index(widest) :]
    return [dtype for dtype in narrower if requested == AUTO or dtype in (widest, folder_dtype)]


def rungs(model: HeldModel, dtypes: list[str], folder_dtype: str, weights_in: list[str]) -> Iterator[HeldModel]:
    """The ways to hold a model, fastest first: all weights in memory, at last those of some blocks in a file.

    Args:
        dtypes: as of `storage_dtypes`. folder_dtype: in the model's folder. weights_in: where weights may be.
    """
    num_blocks = model.shape.num_layers + model.shape.num_decoder_layers
    if DEVICE in weights_in:
        for dtype, malloc in product(dtypes, ("fast", "small")):
            yield replace(model, plan=replace(model.plan, storage=dtype, malloc=malloc))
    if FILE in weights_in:
        fewest = 1 if DEVICE in weights_in else num_blocks
        plan = replace(model.plan, storage=folder_dtype if folder_dtype in dtypes else dtypes[0], weights_in=FILE)
        for blocks in range(fewest, num_blocks + 1):
            yield replace(model, plan=replace(plan, offloaded_blocks=blocks))


def first_that_fits(
    candidates: Iterable[HeldModel], budget_bytes: int, predict: Callable[[HeldModel], dict[str, int]]
) -> HeldModel | None:
    """The first way to hold a model whose work fits into the budget, with room for gaps where malloc leaves some."""
    shares = {"fast": FAST_SHARE, "small": 1.0}
    for candidate in candidates:
        if sum(predict(candidate).values()) <= shares[candidate.plan.malloc] * budget_bytes:
            return candidate
    return None


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, by bisection; 0 where not even 1 does."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def bytes_before(budget: Budget) -> int:
    """What is held, of the memory that the budget is about, before a model is loaded."""
    return 0 if budget.is_on_device else ProcessTree().usage().anon_bytes


def rows_to_measure(
    model: HeldModel,
    budget_bytes: int,
    requested: int | str,
    most: int,
    longest: tuple[int, int],
    flag: str = "eval_batch_size_per_gpu",
) -> int:
    """How many rows are read at once, and their loss measured.

    Args:
        requested: a number is kept; auto: as many of `most` as fit. longest: source and target tokens; without a target
            the encoder alone reads. flag: by which the rows are asked for.
    Raises:
        DoesNotFit: not even one fits, or not so many as were asked for.
    """

    def fits(rows: int) -> bool:
        return sum(model.measuring(rows, *longest).values()) <= budget_bytes

    least = 1 if requested == AUTO else int(requested)
    if not fits(least):
        hints = [f"--{flag}={least // 2}"] if least > 1 else []
        text = "{rows} of up to {source} and {target} tokens" if longest[1] else "{rows} of up to {source} tokens"
        what = say(text, rows=counted(least, "row"), source=longest[0], target=longest[1])
        hints.append(f"--max_seq_len={max(8, longest[0] // 2)}")
        raise does_not_hold(budget_bytes, what, model.measuring(least, *longest), *hints)
    return largest(most, fits) if requested == AUTO else least


def does_not_hold(budget_bytes: int, what: str, parts: Mapping[str, int], *hints: str) -> DoesNotFit:
    """That a budget is too small for something: component -> bytes, and what would help beside a larger one."""
    sizes = [join(" ", [say(name), format_size(size)]) for name, size in parts.items() if size]
    more = say("--memory_budget={size} or more", size=typed_size(sum(parts.values())))
    return DoesNotFit(
        "--memory_budget = {size}, is too small for {what}: {parts}; try {remedies}",
        size=format_size(budget_bytes),
        what=what,
        parts=join(", ", sizes),
        remedies=join(", ", [more, *hints]),
    )
