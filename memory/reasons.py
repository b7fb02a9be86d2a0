"""Why was this way chosen? What a plan says of its dtypes, its kernels and the homes of weights."""

from __future__ import annotations

from collections.abc import Iterator

from config import Config
from memory.cost.prediction import Choice, Machine
from memory.cost.work import FILE


def home_reasons(choice: Choice, total: int) -> Iterator[str]:
    """What is to be told of where weights rest."""
    if choice.away_blocks:
        where = "in a file" if choice.weights_in == FILE else "in the RAM beside the device"
        yield (
            f"the weights of {choice.away_blocks} of {total} blocks rest {where} and are in memory while their block works; "
            "numbers are the same"
        )


def kernel_reasons(choice: Choice, had_kernels: bool) -> Iterator[str]:
    """Whether compiled kernels compute."""
    if choice.kernels:
        yield "computes with compiled kernels where they can"
    elif had_kernels:
        yield "the run computed with compiled kernels, which are not here now: numbers differ in their last places"


def dtype_reasons(config: Config, choice: Choice, machine: Machine, began: tuple[str, str] | None) -> Iterator[str]:
    """Why it computes in what it does: the class of what computes, or the run that is resumed."""
    kind, is_fast = machine.speed_class, machine.multiplies_fast("bfloat16")
    if began and began != (choice.storage, choice.compute):
        yield (
            f"the run was stored in {began[0]} and computed in {began[1]}, in which nothing fits here now: it continues, stored "
            f"in {choice.storage} and computed in {choice.compute}"
        )
    elif began and choice.compute != ("bfloat16" if is_fast else "float32") and choice.compute != "float16":
        slow = "" if is_fast else ", which is slow here"
        yield f"computes in {choice.compute}, as the run began{slow} ({kind})"
    elif choice.compute == "bfloat16":
        yield f"computes in bfloat16: such products are fast here ({kind})"
    elif choice.compute == "float32" and config.memory.mixed_precision != "no":
        at_rest = "" if choice.storage == "float32" else f"; {choice.storage} at rest saves memory"
        yield f"computes in float32: products in bfloat16 are slow here ({kind}){at_rest}"
