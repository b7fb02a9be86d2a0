"""Remarks on a plan beside its figures, in sentences for the user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memory.estimate.precision import FLOAT16, Precision
from memory.estimate.time import predict_seconds
from memory.estimate.weight_offload import mapped_bytes
from memory.estimate.workload import FILE, RAM, ExecutionPlan, Machine, Workload, state_bytes
from memory.step_settings import StepSettings
from memory.step_work import is_long, machine_rows, why_not_compiled
from settings.fields import AUTO, counted
from support.language import say
from support.units import format_size

# Muon was measured with 1.4M to 10M weights (docs/benchmarks.md, quality; docs/recipes.md). It is not the default: its
# products over each matrix are the larger a part of a step the fewer tokens that has, and its state needs memory.
FASTER = "muon"
FASTER_UP_TO = 30e6  # Weights.
OFFLOADED = {
    RAM: (
        "the weights of {away} of {total} blocks are offloaded to RAM and copied to the device while their block is in "
        "use; results are identical"
    ),
    FILE: (
        "the weights of {away} of {total} blocks are offloaded to a file and loaded while their block is in use; "
        "results are identical"
    ),
}
MOST_SLOWER = 2.0  # Times the seconds of a step, for a third of the steps.


def remarks_on(
    settings: StepSettings,
    work: Workload,
    choice: ExecutionPlan,
    machine: Machine,
    rows: int,
    earlier: ExecutionPlan | None = None,
    earlier_precision: Precision | None = None,
) -> Iterator[str]:
    """What a user should know of a plan.

    Args:
        rows: of a step, over all processes.
        earlier: the plan of the run that is resumed. earlier_precision: its dtypes, where they are to be kept.
    """
    yield from _of_rows(settings, choice, machine, rows)
    if settings.is_optimizer_open:
        yield from _of_optimizer(work, choice, machine)
    if choice.offloaded_blocks:
        total = work.model.num_layers + work.model.num_decoder_layers
        yield say(OFFLOADED[choice.weights_in], away=choice.offloaded_blocks, total=total)
    mapped = mapped_bytes(work, choice, machine)
    if mapped:
        yield say(
            "{size} of frozen weights stay mapped from their file: the system may drop and read them again, and the "
            "peak does not count them",
            size=format_size(mapped),
        )
    yield from _of_dtypes(settings.mixed_precision, choice, machine, earlier_precision)
    if earlier is not None and earlier.kernels and not choice.kernels:
        yield say("the run used compiled kernels, which are not available now: results differ in the last digits")
    yield from _of_compiling(settings.compile, work, choice, machine, earlier)
    if machine.no_kernels and not choice.kernels and settings.compiled_kernels is not False:
        yield say("running without compiled kernels: {missing}", missing=machine.no_kernels)


def _of_compiling(
    requested: bool | str, work: Workload, choice: ExecutionPlan, machine: Machine, earlier: ExecutionPlan | None
) -> Iterator[str]:
    """Whether torch compiles the blocks, where it might."""
    if choice.compiled:
        yield say(
            "blocks are compiled by torch at the first steps, which takes about a minute; --compile=False omits it"
        )
    elif earlier is not None and earlier.compiled:
        yield say(
            "the run compiled its blocks, which it does no longer: results differ in the last digits ({reason})",
            reason=why_not_compiled(machine, work, choice) or "--compile=False",
        )
    elif requested == AUTO and machine.fuses_attention and is_long(work):
        reason = why_not_compiled(machine, work, choice)
        if reason:
            yield say("blocks are not compiled: {reason}", reason=reason)


def _of_rows(settings: StepSettings, choice: ExecutionPlan, machine: Machine, rows: int) -> Iterator[str]:
    """How many rows a step has, where nobody has chosen them, and how many pass at once."""
    steps = choice.gradient_accumulation_steps
    sizes = settings.batch_size_per_gpu, settings.gradient_accumulation_steps
    if settings.effective_batch_size == AUTO and AUTO in sizes:
        sentence = (
            "{rows} per step, over all micro-batches and processes, chosen by the machine's RAM; set your "
            "own with --effective_batch_size"
        )
        if rows > machine_rows(machine):
            sentence = (
                "{rows} per step, over all micro-batches and processes: the minimum for the given batch "
                "size; set your own with --effective_batch_size"
            )
        yield say(sentence, rows=counted(rows, "row"))
    if choice.accumulation_passes > 1:
        yield say(
            "the micro-batches of a step take {passes} passes over the model, and gradients are accumulated in between",
            passes=choice.accumulation_passes,
        )
    if settings.gradient_accumulation_steps not in (AUTO, steps):
        yield say(
            "--gradient_accumulation_steps = {asked}, becomes {times} here: {rows} per step in micro-batches of "
            "{micro}",
            asked=settings.gradient_accumulation_steps,
            times=steps,
            rows=counted(choice.batch_size_per_gpu * steps, "row"),
            micro=choice.batch_size_per_gpu,
        )


def _of_optimizer(work: Workload, choice: ExecutionPlan, machine: Machine) -> Iterator[str]:
    """What would learn faster, where nobody has named an optimizer and weights are random."""
    if work.counts["total"] > FASTER_UP_TO:
        return
    faster = replace(work, optimizer=FASTER)
    times = predict_seconds(faster, choice, machine) / predict_seconds(work, choice, machine)
    if times < MOST_SLOWER:
        yield say(
            "{optimizer} uses the least memory; at this size --optimizer={faster} reaches the same loss in a third of "
            "the steps or fewer, for {size} more memory and {times} times the time per step (docs/recipes.md)",
            optimizer=work.optimizer,
            faster=FASTER,
            size=format_size(state_bytes(faster) - state_bytes(work)),
            times=f"{times:.1f}",
        )


def _of_dtypes(requested: str, choice: ExecutionPlan, machine: Machine, began: Precision | None) -> Iterator[str]:
    """Why it computes in these dtypes: the class of the processor, or the run that is resumed."""
    compute = choice.compute
    kind = say(machine.speed_class)
    is_bf16_fast = machine.multiplies_fast("bfloat16")
    if requested == "fp16" and not machine.multiplies_fast(FLOAT16):
        yield say(
            "mixed_precision = fp16 from the preset, the file or config.py is not faster here; using {compute} instead",
            compute=compute,
        )
    if began is not None and began != choice.precision:
        yield say(
            "the run used {began_storage} storage and {began_compute} compute, which no longer fits here: it "
            "continues with {storage} storage and {compute} compute",
            began_storage=began.storage,
            began_compute=began.compute,
            storage=choice.storage,
            compute=compute,
        )
    elif began is not None and compute == ("float32" if is_bf16_fast else "bfloat16"):
        yield say("computing in {compute}, as the run did before ({kind})", compute=compute, kind=kind)
    elif compute == FLOAT16 and not is_bf16_fast:
        yield say(
            "computing in float16 with loss scaling and a float32 residual stream, because fp16 is fast "
            "here and bf16 is not; --mixed_precision=no computes in float32"
        )
    elif compute == "float32" and requested != "no":
        yield say("computing in float32, because bf16 is slow here ({kind})", kind=kind)
