"""Remarks on a plan beside its figures, in sentences for the user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from language import say
from memory.batch_size import effective_batch, machine_rows
from memory.estimate.precision import FLOAT16, Precision
from memory.estimate.time import typical_seconds
from memory.estimate.weight_offload import mapped_bytes
from memory.estimate.workload import FILE, ExecutionPlan, Machine, Workload, state_bytes
from model.shapes import weight_counts
from settings.consistency import PREFERENCES
from settings.declared import Config
from settings.fields import AUTO, counted
from units import format_size

# Measured with 1.4M to 10M weights (docs/benchmarks.md, quality; docs/recipes.md). It is not the default: its products over each
# matrix are the larger a part of a step the fewer tokens that has (of 256 words 1.2 times the seconds), and its state needs room
FASTER, FASTER_UP_TO = "muon", 30e6
WORTH = 2.0  # times the seconds of a step, for a third of the steps; more where a step has few tokens


def size_reasons(config: Config, choice: ExecutionPlan, machine: Machine) -> Iterator[str]:
    """How many rows a step has, where nobody has said it, and how many pass at once."""
    train = config.train
    is_product = AUTO not in (train.batch_size_per_gpu, train.gradient_accumulation_steps)
    if train.effective_batch_size == AUTO and not is_product:
        rows = effective_batch(config, machine)
        reason = (
            "{rows} per step, over all micro-batches and processes, by the RAM of the machine; "
            "set your own with --effective_batch_size"
        )
        if rows > machine_rows(machine):
            reason = (
                "{rows} per step, over all micro-batches and processes: the fewest that the size given allows; "
                "set your own with --effective_batch_size"
            )
        yield say(reason, rows=counted(rows, "row"))
    sizes = {"micro": choice.batch_size_per_gpu, "times": choice.gradient_accumulation_steps}
    if choice.accumulation_passes > 1:
        told = "the micro-batches need {passes} passes over the model, with gradients kept in between"
        yield say(told, passes=choice.accumulation_passes)
    asked, rows = train.gradient_accumulation_steps, choice.batch_size_per_gpu * choice.gradient_accumulation_steps
    if asked not in (AUTO, choice.gradient_accumulation_steps):
        told = (
            "--gradient_accumulation_steps = {asked}, becomes {times} here: {rows} per step in micro-batches of {micro}"
        )
        yield say(told, asked=asked, rows=counted(rows, "row"), **sizes)


def optimizer_reasons(config: Config, work: Workload, choice: ExecutionPlan, machine: Machine) -> Iterator[str]:
    """What would learn faster, where nobody has named an optimizer and weights are random."""
    train, faster = config.train, replace(work, optimizer=FASTER)
    more_bytes = state_bytes(faster) - state_bytes(work)
    times = typical_seconds(faster, choice, machine) / typical_seconds(work, choice, machine)
    is_random = not train.is_finetune and train.finetune_from in (AUTO, None) and not train.is_keep_training
    is_open = config.origin("optimizer") is None and config.data.objective != PREFERENCES and not config.lora.lora_rank
    if is_open and is_random and weight_counts(config.model)["total"] <= FASTER_UP_TO and times < WORTH:
        told = (
            "{optimizer} uses the least memory; at this size --optimizer={faster} reaches the same loss in a third of "
            "the steps or fewer, for {size} more memory and {times} times the time per step (docs/recipes.md)"
        )
        yield say(told, optimizer=train.optimizer, faster=FASTER, size=format_size(more_bytes), times=f"{times:.1f}")


def mapped_reasons(work: Workload, choice: ExecutionPlan, machine: Machine) -> Iterator[str]:
    """How much of a frozen base is not counted."""
    if size := mapped_bytes(work, choice, machine):
        told = "{size} of frozen weights stay mapped from their file: the system may drop and read them again, and the peak does not count them"
        yield say(told, size=format_size(size))


def offload_reasons(choice: ExecutionPlan, total: int) -> Iterator[str]:
    """Where offloaded weights are kept, if there are any."""
    if choice.offloaded_blocks and choice.weights_in == FILE:
        yield say(
            ("the weights of {away} of {total} blocks are offloaded to a file and loaded while their block is in use; "
            "results are identical"),
            away=choice.offloaded_blocks, total=total,
        )  # fmt: skip
    elif choice.offloaded_blocks:
        yield say(
            "the weights of {away} of {total} blocks are offloaded to RAM and copied to the device while their block "
            "is in use; results are identical",
            away=choice.offloaded_blocks, total=total,
        )  # fmt: skip


def kernel_reasons(choice: ExecutionPlan, had_kernels: bool, missing: str) -> Iterator[str]:
    """Whether compiled kernels compute, where that is to be told."""
    if had_kernels and not choice.kernels:
        yield say("the run used compiled kernels, which are not available now: results differ in the last digits")
    if not choice.kernels and missing:
        yield say("running without compiled kernels: {missing}", missing=missing)


def dtype_reasons(config: Config, choice: ExecutionPlan, machine: Machine, began: Precision | None) -> Iterator[str]:
    """Why it computes in what it does: the class of what computes, or the run that is resumed."""
    if config.memory.mixed_precision == "fp16" and not machine.multiplies_fast(FLOAT16):
        told = (
            "mixed_precision = fp16 from the preset, the file or config.py is not faster here; using {compute} instead"
        )
        yield say(told, compute=choice.compute)
    kind, is_fast = say(machine.speed_class), machine.multiplies_fast("bfloat16")
    if began and began != choice.precision:
        yield say(
            "the run used {began_storage} storage and {began_compute} compute, which no longer fits here: it "
            "continues with {storage} storage and {compute} compute",
            began_storage=began.storage, began_compute=began.compute, storage=choice.storage, compute=choice.compute,
        )  # fmt: skip
    elif began and choice.compute != ("bfloat16" if is_fast else "float32") and choice.compute != "float16":
        told = "computing in {compute}, as the run did before, although it is slow here ({kind})"
        if is_fast:
            told = "computing in {compute}, as the run did before ({kind})"
        yield say(told, compute=choice.compute, kind=kind)
    elif choice.compute == FLOAT16 and not is_fast:
        yield say(
            "computing in float16 with a scaled loss and a float32 residual stream, because fp16 is fast here and bf16 is not; "
            "--mixed_precision=no computes in float32"
        )
    elif choice.compute == "float32" and config.memory.mixed_precision != "no":
        yield say("computing in float32, because bf16 is slow here ({kind})", kind=kind)
