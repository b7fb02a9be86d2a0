"""Mutations that no test can notice, since they change nothing that is guaranteed, each with its reason."""

from __future__ import annotations

# (file, first line of the statement, before, after): why
SAME: dict[tuple[str, str, str, str], str] = {
    (
        "engine/objectives/preference.py",
        "return torch.where(margins.abs() <= ROUNDING * size, 0.5, (margins > 0).double())",
        "margins.abs() <= ROUNDING * size",
        "margins.abs() < ROUNDING * size",
    ): "they differ where both answers have probability 1, which no head of more than one word gives",
    ("memory/estimate/blocks.py", "return 0", "0", "1"): "one byte",
    (
        "training/checkpoints/folder.py",
        "named = self.folder / name_of(step) if type(step) is int and step >= 0 else None",
        "0",
        "1",
    ): "no checkpoint is of step 0",
}
