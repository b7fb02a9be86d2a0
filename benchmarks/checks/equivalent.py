"""Mutations that no test can notice, since they change nothing that is guaranteed, each with its reason."""

from __future__ import annotations

# (file, first line of the statement, before, after): why
SAME: dict[tuple[str, str, str, str], str] = {
    (
        "engine/objectives/preference.py", "return torch.where(margins.abs() <= ROUNDING * size, 0.5, (margins > 0).double())",
        "margins.abs() <= ROUNDING * size", "margins.abs() < ROUNDING * size",
    ): "they differ where both answers have probability 1, which no head of more than one word gives",
    ("memory/estimate/blocks.py", "return 0", "0", "1"): "one byte",
    (
        "memory/estimate/blocks.py", "is_fused: bool = False", "False", "True",
    ): "who counts for a GPU says it; on a CPU nobody looks at it",
    (
        "memory/estimate/shapes.py", "_known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)", "False", "True",
    ): "nobody passes what shapes remember, or shows it",
    (
        "memory/estimate/shapes.py", "for most, part, filled in zip((largest.source, largest.target), (self.sources, self.targets), sizes,",
        "True", "False",
    ): "both sides of each, always",
    (
        "memory/estimate/shapes.py", "rows = [self._same.setdefault(row, row) for row in sides if row[0]]",
        "0", "-1",
    ): "a row has tokens on both sides or on none",
    (
        "memory/probe.py", "return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:20]", "True", "False",
    ): "the facts stand in one order anyway; another name costs one probe",
    (
        "training/checkpoints/folder.py", "named = self.folder / name_of(step) if type(step) is int and step >= 0 else None", "0", "1",
    ): "no checkpoint is of step 0",
}  # fmt: skip
