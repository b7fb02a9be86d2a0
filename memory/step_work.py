"""The work of a step, and what settings and machine decide about how it is computed, before any plan."""

from __future__ import annotations

import math

from limits import LEAST_SCORES, MOST_SCORES
from memory.batch_size import effective_batch
from memory.estimate.workload import Machine, Workload, adapted_by, trained_counts
from settings.consistency import PREFERENCES
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO

SCORES_SHARE = 256  # Bytes of the budget for each score: some 12 of them are in use at a time.


def make_work(config: Config, machine: Machine, source_tokens: int | None, target_tokens: int | None) -> Workload:
    """The work of one rank's share of a step; lengths that are None are the longest that the settings allow."""
    train = config.train
    source_tokens = source_tokens or config.data.max_seq_len
    if target_tokens is None:
        target_tokens = _longest_target(config, source_tokens)
    trains_a_part = train.freeze or config.lora.lora_rank
    return Workload(
        config.model,
        rows=math.ceil(effective_batch(config, machine) / machine.num_processes),
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        dropout=config.model.dropout_rate > 0,
        optimizer=train.optimizer,
        hold_gradients=train.max_grad_norm > 0,
        sample_rows=train.sample_rows,
        answers=_answers(config),
        trained=trained_counts(config) if trains_a_part else None,
        adapted=adapted_by(config),
    )


def _answers(config: Config) -> int:
    return 2 if config.data.objective == PREFERENCES else 1


def _longest_target(config: Config, source_tokens: int) -> int:
    data = config.data
    if not config.model.is_text:
        # A decoder without text reads what the encoder reads.
        return source_tokens if config.model.num_decoder_layers else 0
    if data.max_target_len != AUTO:
        return _answers(config) * int(data.max_target_len)
    share = 1.0
    if data.objective == "span":
        # A share of the tokens is masked, and each span of them adds a sentinel.
        share = 1.3 * data.noise_density * (1 + 1 / data.mean_noise_span_length)
    return _answers(config) * math.ceil(source_tokens * share)


def scores_of(machine: Machine) -> int:
    """Scores of attention that a GPU forms at a time: a power of two, about 5% of the budget; 0 on a CPU."""
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
