"""Mutations that no test can notice, since they change nothing that is guaranteed, each with its reason."""

from __future__ import annotations

# A number is one more or one less, by its line. File, first line of the statement, why nothing changes, and pairs of
# what stands there before and after.
ROWS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "memory/answers.py",
        "return cls(shape, ExecutionPlan(1, 1, 1, 0, 1, loaded, compute, LOSS_CHUNK_BYTES, 'small'), base_byt",
        "answers have no training step",
        [("1", "2"), ("1", "0"), ("0", "1"), ("0", "-1")],
    ),
    (
        "memory/answers.py",
        "work = Workload(self.shape, 1, 1, 1, dropout=False, optimizer='adafactor')",
        "weights take as much whatever the rows",
        [("1", "0"), ("1", "2"), ("False", "True")],
    ),
    (
        "memory/answers.py",
        "return resident_bytes(work, self.plan) + slots_bytes(work, self.plan, Machine(0, 0))",
        "of the machine, only the number of processes is read",
        [("0", "1"), ("0", "-1")],
    ),
    (
        "engine/objectives/preference.py",
        "return torch.where(margins.abs() <= ROUNDING * size, 0.5, (margins > 0).double())",
        "they differ where both answers have probability 1, which no head of more than one word gives",
        [("margins.abs() <= ROUNDING * size", "margins.abs() < ROUNDING * size")],
    ),
    (
        "engine/optimizers/muon.py",
        "_orthogonalise(update.mT if n < m else update)",
        "a square matrix may be turned or not",
        [("n < m", "n <= m")],
    ),
    ("memory/estimate/blocks.py", "return 0", "one byte", [("0", "1"), ("0", "-1")]),
    (
        "memory/estimate/blocks.py",
        "NO_ADAPTERS = Adapted((), drops=False)",
        "inputs of no matrix are dropped",
        [("False", "True")],
    ),
    (
        "memory/estimate/blocks.py",
        "sources, targets = zip(*self.rows, strict=True)",
        "both have one length",
        [("True", "False")],
    ),
    (
        "memory/estimate/blocks.py",
        "sources, targets = zip(*rows, strict=True)",
        "both have one length",
        [("True", "False")],
    ),
    (
        "memory/estimate/peaks.py",
        "sources, targets = zip(*(lengths for rows in micro_batches for lengths in rows), strict=True)",
        "both have one length",
        [("True", "False")],
    ),
    ("memory/estimate/blocks.py", "highest = 0", "below any size", [("0", "1"), ("0", "-1")]),
    ("memory/estimate/blocks.py", "largest_tile = 0", "below any size", [("0", "1"), ("0", "-1")]),
    (
        "memory/estimate/peaks.py",
        "token_rows = trained.parts['embedding'] + max(0, trained.parts['head'] - label_head)",
        "below any size",
        [("0", "-1")],
    ),
    ("training/checkpoints/run_lock.py", "lock.acquire(timeout=0)", "the same refusal, a second later", [("0", "1")]),
    (
        "training/checkpoints/runs.py",
        "checkpoints = Checkpoints(run_dir, keep_latest=1)",
        "nothing is removed, and all checkpoints are looked at",
        [("1", "0"), ("1", "2")],
    ),
]
# (file, first line of the statement, before, after): why
SAME: dict[tuple[str, str, str, str], str] = {
    (file, statement, before, after): reason for file, statement, reason, changes in ROWS for before, after in changes
}
