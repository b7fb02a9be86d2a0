"""What a resumed run keeps of the plan that it had: the same cut and dtypes, so that it computes as before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from memory.estimate.precision import FLOAT16, Precision, requested_precision
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.step_work import evaluation_batch, kernels_of, scores_of, why_not_compiled
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO

# How a user may cut a step; an execution plan has fields of the same names.
EVALUATION_BATCH = "eval_batch_size_per_gpu"
MICRO_BATCHES = ("batch_size_per_gpu", EVALUATION_BATCH, "gradient_accumulation_steps")
STEP_SETTINGS = (*MICRO_BATCHES, "memory_mode", "gradient_checkpointing")


def step_settings(config: Config) -> dict[str, Any]:
    """How a start asks for its steps to be cut and to save memory, by setting: kept beside the plan that was made for
    it.
    """
    values = config.as_dict()
    return {name: values[name] for name in STEP_SETTINGS}


def changed_step_settings(config: Config, before: Mapping[str, Any]) -> frozenset[str]:
    """Which of the step's settings this start gives another value than the one that the run's plan was made for.

    A value that is repeated, as by a restart, is none of them: the run may have had to take less since.

    Args:
        before: `step_settings` of then.
    """
    now = step_settings(config)
    return frozenset(name for name, value in now.items() if before.get(name, value) != value)


def precision_to_keep(config: Config, machine: Machine, earlier: ExecutionPlan) -> Precision | None:
    """The dtypes of the earlier plan; None where the settings ask for others.

    Raises:
        UserError: the run computes in what this device does not.
    """
    precision = earlier.precision
    requested = requested_precision(config, machine.multiplies_fast)
    if requested not in (AUTO, precision.mixed_precision) and not config.lora.lora_rank:
        return None
    if precision.compute == FLOAT16 and not machine.rate("float16"):
        raise UserError(
            "--is_keep_training = True, the run computes in fp16, which is not trained in on this device; allowed: a "
            "GPU with fp16 tensor cores; resume it there, or start another run with --mixed_precision=auto"
        )
    return precision


def choice_to_keep(
    config: Config, machine: Machine, work: Workload, earlier: ExecutionPlan, changed: Collection[str]
) -> ExecutionPlan | None:
    """The earlier plan with the kernels, scores and evaluation of now; None where steps are to be cut or to save
    otherwise.

    Args:
        changed: settings that this start changes, see `changed_step_settings`.
    """
    # A run that comes from a GPU had no compiled kernels to use, and keeps none of its bits here anyway.
    leaves_gpu = earlier.scores > 0 and not machine.pads_attention
    may_use_kernels = earlier.kernels or config.run.compiled_kernels is True or leaves_gpu
    choice = replace(
        earlier,
        kernels=may_use_kernels and kernels_of(config, machine),
        scores=(earlier.scores or scores_of(machine)) if machine.pads_attention else 0,
    )
    compiled = earlier.compiled if config.train.compile == AUTO else config.train.compile is True
    choice = replace(choice, compiled=compiled and not why_not_compiled(machine, work, choice))
    if EVALUATION_BATCH in changed:
        choice = replace(choice, eval_batch_size_per_gpu=evaluation_batch(config, machine, earlier.batch_size_per_gpu))
    values = step_settings(config)
    for name in {*changed} - {EVALUATION_BATCH}:
        if name not in MICRO_BATCHES or values[name] != getattr(earlier, name):
            return None
    rows = choice.batch_size_per_gpu * choice.gradient_accumulation_steps
    # Where a micro-batch is bound by its tokens, there are more micro-batches than its rows alone would make.
    is_full = work.step_shapes.max_tokens is not None or work.rows > rows - choice.batch_size_per_gpu
    return choice if rows >= work.rows and is_full else None
