"""What a resumed run keeps of the plan that it had: the same cut and dtypes, so that it computes as before."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from memory.estimate.precision import FLOAT16, Precision
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.step_settings import EVALUATION_BATCH, MICRO_BATCHES, StepSettings
from memory.step_work import evaluation_batch, kernels_of, scores_of, why_not_compiled
from settings.errors import UserError
from settings.fields import AUTO


def precision_to_keep(settings: StepSettings, machine: Machine, earlier: ExecutionPlan) -> Precision | None:
    """The dtypes of the earlier plan; None where the settings ask for others.

    Raises:
        UserError: the run computes in what this device does not.
    """
    precision = earlier.precision
    requested = settings.requested_precision(machine.multiplies_fast)
    if requested not in (AUTO, precision.mixed_precision) and settings.lora_base is None:
        return None
    if precision.compute == FLOAT16 and not machine.rate("float16"):
        raise UserError(
            "--is_keep_training = True, the run computes in fp16, which is not trained in on this device; allowed: a "
            "GPU with fp16 tensor cores; resume it there, or start another run with --mixed_precision=auto"
        )
    return precision


def choice_to_keep(
    settings: StepSettings, machine: Machine, work: Workload, earlier: ExecutionPlan, changed: Collection[str]
) -> ExecutionPlan | None:
    """The earlier plan with the kernels, scores and evaluation of now; None where steps are to be cut or to save
    otherwise.

    Args:
        changed: settings that this start changes, see `StepSettings.changed_since`.
    """
    # A run that comes from a GPU had no compiled kernels to use, and keeps none of its bits here anyway.
    leaves_gpu = earlier.scores > 0 and not machine.pads_attention
    may_use_kernels = earlier.kernels or settings.compiled_kernels is True or leaves_gpu
    choice = replace(
        earlier,
        kernels=may_use_kernels and kernels_of(settings.compiled_kernels, machine),
        scores=(earlier.scores or scores_of(machine)) if machine.pads_attention else 0,
    )
    compiled = earlier.compiled if settings.compile == AUTO else settings.compile
    choice = replace(choice, compiled=bool(compiled) and not why_not_compiled(machine, work, choice))
    if EVALUATION_BATCH in changed:
        choice = replace(
            choice, eval_batch_size_per_gpu=evaluation_batch(settings, machine, earlier.batch_size_per_gpu)
        )
    for name in {*changed} - {EVALUATION_BATCH}:
        if name not in MICRO_BATCHES or getattr(settings, name) != getattr(earlier, name):
            return None
    rows = choice.batch_size_per_gpu * choice.gradient_accumulation_steps
    # Where a micro-batch is bound by its tokens, there are more micro-batches than its rows alone would make.
    is_full = work.step_shapes.max_tokens is not None or work.rows > rows - choice.batch_size_per_gpu
    return choice if rows >= work.rows and is_full else None
