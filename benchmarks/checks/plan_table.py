"""The README's table of models and machines, as `plan` answers: `python -m benchmarks.checks.plan_table`.

A figure is the predicted peak of full-parameter training at effective batch 16, span corruption with 512 + 114 tokens,
Adafactor; "-" where no plan fits.
"""

from __future__ import annotations

import re
from functools import cache

from benchmarks.parts.results import ROOT, markdown
from config import DoesNotFit, load
from memory.machines import target_machine
from memory.plan import plan
from units import format_size

MODELS = ("t5-small", "t5-base", "chatlm-0.2b", "t5-large", "t5-v1.1-large", "t5-3b")
MACHINES = ("laptop_8gb", "mac_8gb", "gpu_4gb", "gpu_8gb", "mac_16gb", "workstation_32gb_amx")
BEGIN, END = "<!-- plan-table -->", "<!-- /plan-table -->"


def cell(model: str, machine: str) -> str:
    """Predicted peak of one model on one machine."""
    config = load(
        "train", {"train_file": "any", "model_preset": model, "effective_batch_size": "16", "objective": "span"}
    )
    try:
        return format_size(plan(config, target_machine(machine), source_tokens=512, target_tokens=114).peak_bytes)
    except DoesNotFit:
        return "-"


@cache
def table() -> str:
    """The table between its markers, the same for every page."""
    rows = [[model, *(cell(model, machine) for machine in MACHINES)] for model in MODELS]
    return f"{BEGIN}\n{markdown(['model', *MACHINES], rows)}\n{END}"


def with_table(text: str) -> str:
    """A page with its table brought up to date."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: table(), text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in ("README.md", "README.zh-CN.md"):
        page = ROOT / name
        page.write_text(with_table(page.read_text(encoding="utf8")), encoding="utf8")
