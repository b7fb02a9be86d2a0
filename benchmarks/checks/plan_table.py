"""The README's table of models and machines, as `plan` answers: `python -m benchmarks.checks.plan_table`.

In the READMEs a figure is the predicted peak of full-parameter training at effective batch 16, span corruption with 512
+ 114 tokens, Adafactor; "-" where no plan fits. In docs/finetuning.md a cell is the predicted peak of finetuning ByT5
and the hours for 10,000 pairs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from benchmarks.page import ROOT, markdown
from memory.estimate.workload import FILE
from memory.machines import target_machine
from memory.plan import plan
from settings.errors import DoesNotFit
from settings.loading import load
from support.units import format_size

MODELS = ("t5-small", "t5-base", "chatlm-0.2b", "t5-large", "t5-v1.1-large", "t5-3b")
MACHINES = ("laptop_8gb", "mac_8gb", "gpu_4gb", "gpu_8gb", "mac_16gb", "workstation_32gb_amx")
BEGIN, END = "<!-- plan-table -->", "<!-- /plan-table -->"
BYT5 = ("byt5-small", "byt5-base", "byt5-large", "byt5-3b")
CARDS = ("gpu_8gb", "gpu_12gb", "gpu_16gb_t4", "gpu_24gb")
TRAINED = {"all weights": {}, "`--lora_rank=16`": {"lora_rank": "16"}}
BYT5_BEGIN, BYT5_END = "<!-- byt5-table -->", "<!-- /byt5-table -->"
PAIRS, EFFECTIVE_BATCH = 10_000, 16


def cell(model: str, machine: str) -> str:
    """Predicted peak of one model on one machine."""
    config = load(
        "train", {"train_file": "any", "model_preset": model, "effective_batch_size": "16", "objective": "span"}
    )
    try:
        return format_size(plan(config, target_machine(machine), source_tokens=512, target_tokens=114).peak_bytes)
    except DoesNotFit:
        return "-"


def byt5_cell(model: str, machine: str, flags: Mapping[str, str]) -> str:
    """Predicted peak and time of finetuning on pairs of 2,048 and 512 bytes."""
    run = {"train_file": "any", "is_finetune": "True", "effective_batch_size": str(EFFECTIVE_BATCH), **flags}
    config = load("train", {"model_preset": model, **run})
    try:
        found = plan(config, target_machine(machine), source_tokens=2048, target_tokens=512)
    except DoesNotFit:
        return "-"
    hours = found.seconds * PAIRS / EFFECTIVE_BATCH / 3600
    where = ", weights in a file" if found.choice.weights_in == FILE and found.choice.offloaded_blocks else ""
    return f"{format_size(found.peak_bytes)}, {hours:.1f} h{where}"


@cache
def byt5_table() -> str:
    """The table of ByT5 between its markers."""
    rows = [
        [model, how, *(byt5_cell(model, card, flags) for card in CARDS)]
        for model in BYT5
        for how, flags in TRAINED.items()
    ]
    return f"{BYT5_BEGIN}\n{markdown(['model', 'trained', *CARDS], rows)}\n{BYT5_END}"


@cache
def table() -> str:
    """The table between its markers, the same for every page."""
    rows = [[model, *(cell(model, machine) for machine in MACHINES)] for model in MODELS]
    return f"{BEGIN}\n{markdown(['model', *MACHINES], rows)}\n{END}"


def with_table(text: str) -> str:
    """A page with its table brought up to date."""
    for begin, end, made in ((BEGIN, END, table), (BYT5_BEGIN, BYT5_END, byt5_table)):
        if begin in text:
            text = re.sub(f"{begin}.*?{end}", lambda _, made=made: made(), text, flags=re.DOTALL)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for name in ("README.md", "README.zh-CN.md", "docs/finetuning.md"):
        page = ROOT / name
        page.write_text(with_table(page.read_text(encoding="utf8")), encoding="utf8")
