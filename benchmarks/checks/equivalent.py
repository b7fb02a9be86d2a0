"""Mutations that no test can notice, since they change nothing that is guaranteed, each with its reason."""

from __future__ import annotations

# (file, first line of the statement, before, after): why
SAME: dict[tuple[str, str, str, str], str] = {
    **{
        (
            "memory/answers.py",
            "return cls(shape, ExecutionPlan(1, 1, 1, 0, 1, loaded, compute, LOSS_CHUNK_BYTES, 'small'), base_byt",
            *change,
        ): "answers have no training step"
        for change in (("1", "2"), ("0", "1"))
    },
    **{
        (
            "memory/answers.py",
            "work = Workload(self.shape, 1, 1, 1, dropout=False, optimizer='adafactor')",
            *change,
        ): "weights take as much whatever the rows"
        for change in (("1", "0"), ("False", "True"))
    },
    (
        "memory/answers.py",
        "return resident_bytes(work, self.plan) + slots_bytes(work, self.plan, Machine(0, 0))",
        "0",
        "1",
    ): "of the machine, only the number of processes is read",
    (
        "engine/objectives/preference.py",
        "return torch.where(margins.abs() <= ROUNDING * size, 0.5, (margins > 0).double())",
        "margins.abs() <= ROUNDING * size",
        "margins.abs() < ROUNDING * size",
    ): "they differ where both answers have probability 1, which no head of more than one word gives",
    (
        "engine/optimizers/muon.py",
        "_orthogonalise(update.mT if n < m else update)",
        "n < m",
        "n <= m",
    ): "a square matrix may be turned or not",
    ("memory/estimate/blocks.py", "return 0", "0", "1"): "one byte",
    (
        "memory/estimate/blocks.py",
        "NO_ADAPTERS = Adapted((), drops=False)",
        "False",
        "True",
    ): "inputs of no matrix are dropped",
    **{
        (file, statement, "True", "False"): "both have one length"
        for file, statement in (
            ("memory/estimate/blocks.py", "sources, targets = zip(*self.rows, strict=True)"),
            ("memory/estimate/blocks.py", "sources, targets = zip(*rows, strict=True)"),
            (
                "memory/estimate/peaks.py",
                "sources, targets = zip(*(lengths for rows in micro_batches for lengths in rows), strict=True)",
            ),
        )
    },
    **{
        (file, statement, "0", changed): "below any size"
        for file, statement, changed in (
            ("memory/estimate/blocks.py", "highest = 0", "-1"),
            ("memory/estimate/blocks.py", "largest_tile = 0", "1"),
            (
                "memory/estimate/peaks.py",
                "token_rows = trained.parts['embedding'] + max(0, trained.parts['head'] - label_head)",
                "-1",
            ),
        )
    },
    (
        "training/checkpoints/folder.py",
        "named = self.folder / name_of(step) if type(step) is int and step >= 0 else None",
        "0",
        "1",
    ): "no checkpoint is of step 0",
    (
        "training/checkpoints/run_lock.py",
        "lock.acquire(timeout=0)",
        "0",
        "1",
    ): "the same refusal, a second later",
    (
        "training/checkpoints/runs.py",
        "checkpoints = Checkpoints(run_dir, keep_latest=1)",
        "1",
        "0",
    ): "nothing is removed, and all checkpoints are looked at",
}
