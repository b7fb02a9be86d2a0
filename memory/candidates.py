"""Candidates: the execution plans that settings, machine and work allow; `memory.plan` takes one of them.

They differ in micro-batches that pass together or one after another, saved blocks, dtypes, chunks of the loss, what malloc
holds, what is offloaded. Whether one fits is asked in `memory.plan`, where weights are kept in `memory.weight_offload`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from limits import DEVICE_LOSS_CHUNK_BYTES, LEAST_SCORES, LOSS_CHUNK_BYTES, MALLOCS, MOST_SCORES
from memory.batch_size import effective_batch, evaluation_batch, micro_batches
from memory.estimate.peaks import offloaded_bytes
from memory.estimate.precision import FLOAT16, FLOAT32, Precision, precisions
from memory.estimate.workload import ExecutionPlan, Machine, Workload, adapted_by, trained_counts
from settings.consistency import PREFERENCES, writes_answers
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO
from settings.program import SCRIPT

# how a user may cut a step; a choice names its own alike
MICRO_BATCHES = ("batch_size_per_gpu", "eval_batch_size_per_gpu", "gradient_accumulation_steps")
EVALUATION_BATCH, SAVINGS = MICRO_BATCHES[1], ("memory_mode", "gradient_checkpointing", "offload_boundaries")
# d_model from which the system's clearing of pages is not seen beside the products: on AVX2 steps of 192 and 256 wide models take
# 13 to 19% less time when it is spared, those of 512 wide ones no less that could be measured
UNTRIMMED_BELOW = 512
SCORES_SHARE = 256  # bytes of the budget for each score: some 12 of them are in use, while they are computed with


def make_work(config: Config, machine: Machine, source_tokens: int | None, target_tokens: int | None) -> Workload:
    """The work of one rank's share of a step; lengths that are None are the longest that the settings allow."""
    data, train = config.data, config.train
    answers = 2 if data.objective == PREFERENCES else 1
    source = source_tokens or data.max_seq_len
    if target_tokens is None and not config.model.is_text:  # a decoder reads what the encoder reads
        target_tokens = source if config.model.num_decoder_layers else 0
    elif target_tokens is None:
        asked = data.max_target_len
        is_span = data.objective == "span"  # masks a share of the tokens, and adds a sentinel for each span
        share = 1.3 * data.noise_density * (1 + 1 / data.mean_noise_span_length) if is_span else 1.0
        target_tokens = answers * (math.ceil(source * share) if asked == AUTO else int(asked))
    rows = math.ceil(effective_batch(config, machine) / machine.num_processes)
    drops = config.model.dropout_rate > 0
    clips = train.max_grad_norm > 0
    return Workload(
        config.model, rows, source, target_tokens, drops, train.optimizer, train.bf16_rounding, clips, answers=answers,
        trained=trained_counts(config) if config.train.freeze or config.lora.lora_rank else None,
        sample_rows=train.sample_rows, adapted=adapted_by(config),
    )  # fmt: skip


def candidates(
    config: Config, machine: Machine, work: Workload, settled: Precision | None = None, *, parted: bool = False
) -> Iterator[ExecutionPlan]:
    """All execution plans of a step that the settings allow.

    Args:
        settled: in this precision alone. parted: those of several accumulation passes that save as few blocks as may be. They
            hold the gradients of all weights and ask for each weight once more a pass, and the checkpointed activations of
            a part of the rows alone: what adapters need, whose gradients are small, where the rows are many.
    """
    total_blocks = work.model.num_layers + work.model.num_decoder_layers
    for storage, compute, _ in [settled] if settled else precisions(config, machine.multiplies_fast):
        for batch_size in micro_batches(config, work.rows):
            count, sizes = work.step_shapes.count(batch_size), work.step_shapes.sizes(batch_size)
            for accumulation_passes, shards in passes_and_shards(config, machine, count, parted):
                for saved in _saved_blocks(config, total_blocks, accumulation_passes, parted):
                    for chunk, malloc in product(_chunks(machine), _mallocs(config, machine, saved == total_blocks)):
                        evaluation = evaluation_batch(config, machine, batch_size)
                        # whether a scaled gradient is finite is not asked over shards
                        products = FLOAT32 if shards > 1 and compute == FLOAT16 else compute
                        choice = ExecutionPlan(
                            batch_size, count // accumulation_passes, accumulation_passes, saved, evaluation, storage, products, chunk, malloc, shards,
                            source_sizes=sizes[0], target_sizes=sizes[1], kernels=kernels_of(config, machine),
                            scores=scores_of(machine),
                        )  # fmt: skip
                        yield from _with_offload(config, machine, work, choice)


def step_settings(config: Config) -> dict[str, Any]:
    """How a start asks for its steps to be cut and to save memory, by setting: kept beside the choice that was made for it."""
    values = config.as_dict()
    return {name: values[name] for name in (*MICRO_BATCHES, *SAVINGS)}


def newly_asked(config: Config, before: Mapping[str, Any] | None) -> frozenset[str]:
    """Which of the step's settings this start gives another value than the one that the run's choice was made for.

    A value that is said again, as by a restart, is none: the run may have had to take less since.

    Args:
        before: `step_settings` of then; None: an older checkpoint, where all that is named now counts.
    """
    now = step_settings(config)
    if before is None:
        return frozenset(name for name in now if config.origin(name) == "flag")
    return frozenset(name for name, value in now.items() if before.get(name, value) != value)


def as_asked(config: Config, machine: Machine, choice: ExecutionPlan, anew: Collection[str]) -> ExecutionPlan | None:
    """An earlier choice with the evaluation of now; None where a step is asked for that is cut or saves otherwise."""
    if EVALUATION_BATCH in anew:
        choice = replace(choice, eval_batch_size_per_gpu=evaluation_batch(config, machine, choice.batch_size_per_gpu))
    others = [name for name in anew if name != EVALUATION_BATCH]
    alike = (name in MICRO_BATCHES and getattr(config.train, name) == getattr(choice, name) for name in others)
    return choice if all(alike) else None


def _chunks(machine: Machine) -> tuple[int, ...]:
    """Bytes of the loss's logits that are formed together, the fastest first."""
    chunks = tuple(LOSS_CHUNK_BYTES // cut for cut in (1, 2, 4))
    return (DEVICE_LOSS_CHUNK_BYTES, *chunks) if machine.pads_attention else chunks


def _mallocs(config: Config, machine: Machine, is_saved: bool) -> tuple[str, ...]:
    """The tunings of malloc, the fastest first; what a step frees is kept for the next in narrow models that save all graphs."""
    is_narrow = config.model.d_model < UNTRIMMED_BELOW and not machine.pads_attention
    keeps = is_saved and is_narrow and config.memory.memory_mode in (AUTO, "standard")
    return tuple(malloc for malloc in reversed(MALLOCS) if keeps or malloc != "untrimmed")


def scores_of(machine: Machine) -> int:
    """Scores of attention that a GPU forms at a time, a power of two: with all that goes with them 5% of the budget; 0: a CPU."""
    if not machine.pads_attention:
        return 0
    most = max(1, machine.budget_bytes // SCORES_SHARE)
    return min(MOST_SCORES, max(LEAST_SCORES, 1 << most.bit_length() - 1))


def kernels_of(config: Config, machine: Machine) -> bool:
    """Whether compiled kernels compute; a fact of machine and settings, never of a stopwatch."""
    if config.run.compiled_kernels is True and not machine.has_kernels:
        raise UserError(
            "--compiled_kernels = True, there are none here; allowed: auto or False, or a CPU with AVX2 under Linux and a C "
            "compiler (apt install gcc); `doctor` says what is missing"
        )
    return machine.has_kernels and config.run.compiled_kernels is not False


def _with_offload(config: Config, machine: Machine, work: Workload, choice: ExecutionPlan) -> Iterator[ExecutionPlan]:
    """The choice as it is, and with checkpointed activations in the host's memory, where that is wanted and possible."""
    asked = config.memory.offload_boundaries
    if asked is True and not machine.host_bytes:
        raise UserError(
            "--offload_boundaries = True, moves checkpointed activations from a GPU into the RAM beside it; this device computes in the "
            "RAM itself or cannot copy while it computes; allowed here: auto or False"
        )
    recomputes = choice.saved_blocks < work.model.num_layers + work.model.num_decoder_layers
    if asked is not True:
        yield choice
    if asked is True and recomputes:
        yield replace(choice, offload_boundaries=True)
    elif not machine.host_bytes or asked is False or choice.saved_blocks:
        return
    elif offloaded_bytes(work, moved := replace(choice, offload_boundaries=True), machine) <= machine.host_bytes:
        yield moved


def passes_and_shards(config: Config, machine: Machine, count: int, parted: bool = False) -> list[tuple[int, int]]:
    """Accumulation passes of one step, and processes that share the weights; sharded weights pass by once a step."""
    asked, processes = config.memory.shard_weights, machine.num_processes
    if asked is True and processes == 1:
        raise UserError(
            "--shard_weights = True, shards the weights over processes, but there is only one; start several, as "
            "with torchrun --nproc_per_node=2 {script} ..., or omit it",
            script=SCRIPT,
        )
    # ways of training that have not learned it; answers have as many tokens as they come to have, on each process others
    apart = config.lora.lora_rank or config.data.objective == PREFERENCES or writes_answers(config)
    holds_all = config.train.max_grad_norm > 0 or config.memory.mixed_precision == "fp16"  # sharded gradients never are
    can_shard = processes > 1 and not holds_all and not apart
    passes: list[int] = []
    if asked is not True or not can_shard:
        passes = [n for n in range(2, count + 1) if count % n == 0] if parted else sorted({1, count})
    sharded = [(1, processes)] if can_shard and asked in (True, AUTO) and not parted else []
    return [*((number, 1) for number in passes), *sharded]


def _saved_blocks(config: Config, total: int, accumulation_passes: int, parted: bool) -> list[int]:
    mode, recomputes = config.memory.memory_mode, config.memory.gradient_checkpointing
    if recomputes is True or mode == "ultra":
        return [0]
    if recomputes is False or mode == "standard" or (accumulation_passes > 1 and not parted):
        return [total]
    return [0] if parted else list(range(0, total + 1))
