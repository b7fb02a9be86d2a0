"""All rows of a job into shards; a killed attempt continues after the last shard that it finished.

Rows stream through: read, clean, encode (in several processes), hold out, write. A blank row is dropped, a pair that is too
long is cut by tokens with end of text as its last one; both are counted. Nothing else is lost: the token stream keeps every
token of every document. The shards depend neither on where an attempt ended nor on the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches.order import mix
from data.prepare.duplicates import RESULT, find_duplicates
from data.prepare.encode import Encoded, load_encoder
from data.prepare.passes import Batch, Position, Run, read_batches, save_state, saved_state, workers_in_order
from data.progress import ProgressLine
from data.shards.store import TRAIN, VALIDATION
from data.shards.writer import ShardWriter
from data.sources.columns import Columns
from data.sources.lines import BadRows
from data.sources.reading import check_columns
from data.sources.source import Source
from data.task import RowLimits, Task
from data.text.clean import Dropped
from data.text.conversations import Examples
from language import say
from settings.errors import UserError, refuse

HELD_OUT_ONE_IN = 100
PROGRESS = "progress.json"
COUNTS = (
    "rows",
    "tokens",
    "texts",
    "bad_rows",
    "empty_rows",
    "cut_rows",
    "cut_tokens",
    "unknown_tokens",
    "dropped_rows",
    "duplicate_rows",
)

# 1, 2, 3, 4, 6, 8, 12, 16 ...: two buckets for each doubling.
BOUNDS = np.array(sorted({1} | {2**n for n in range(1, 25)} | {3 * 2**n for n in range(24)}), np.int64)


@dataclass(frozen=True)
class Job:
    """What is to be encoded.

    Args:
        columns: what rows are made of.
        train: sources, all of them for training, or with `hold_out` one row in a hundred for validation; may be none.
        validation: sources of the validation split; may be none.
        limits: to which the stored columns are cut.
        max_samples: rows of `train` that are read; None: all.
        parts: the names of the parts that `Source.part` counts. sets: those of the validation sets; none: all are one.
        examples: how a row becomes the texts that are encoded; with turns, one row may become several.
        dedup: none or exact; duplicates are looked for in `train`.
    """

    task: Task
    columns: Columns
    train: Sequence[Source]
    validation: Sequence[Source]
    hold_out: bool
    limits: RowLimits
    max_samples: int | None
    skip_bad_rows: bool
    parts: Sequence[str] = ("",)
    sets: Sequence[str] = ()
    examples: Examples = field(default_factory=Examples)
    dedup: str = "none"


@dataclass
class LengthCounts:
    """Token lengths of one column.

    Args:
        longest: of the rows as they are stored; longest_uncut: before they were cut; total: tokens stored.
        counts: rows per bucket; bucket i holds the lengths up to `BOUNDS[i]` that no earlier one holds.
    """

    longest: int = 0
    longest_uncut: int = 0
    total: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    def add(self, lengths: NDArray[np.int64], uncut: NDArray[np.int64]) -> None:
        """Count one or more rows: (rows,) tokens as stored, and before cutting."""
        self.longest = max(self.longest, int(lengths.max()))
        self.longest_uncut = max(self.longest_uncut, int(uncut.max()))
        self.total += int(lengths.sum())
        counts = np.bincount(np.searchsorted(BOUNDS, lengths), minlength=len(self.counts))
        self.counts = (np.array(self.counts) + counts).tolist()

    def facts(self) -> dict[str, Any]:
        """What the manifest says; `histogram` lists [longest length of the bucket, rows] without empty buckets."""
        rows = sum(self.counts)
        histogram = [[int(bound), count] for bound, count in zip(BOUNDS, self.counts, strict=False) if count]
        return {
            "longest": self.longest,
            "longest_uncut": self.longest_uncut,
            "mean": round(self.total / max(rows, 1), 2),
            "histogram": histogram,
        }


class Split:
    """Rows of one split on their way to disk, with their counts.

    Args:
        state: what `state` returned; None: a new split.
    """

    def __init__(self, folder: Path, job: Job, vocab_size: int, state: dict[str, Any] | None) -> None:
        self.format = job.task.shards
        self.keeps_references = folder.name != TRAIN
        names = job.columns.names
        state = {
            "writer": None,
            "label_counts": [0] * len(names or ()),
            "counts": dict.fromkeys(COUNTS, 0),
            "lengths": [{}] * len(self.format.columns),
            "parts": [],
            "position": {},
            "usable": 0,
            "kept": 0,
        } | (state or {})
        self.writer = ShardWriter(folder, self.format, vocab_size, state["writer"], is_regression=names == ())
        self.label_counts: list[int] = state["label_counts"]
        self.counts: dict[str, int] = state["counts"]
        self.lengths = [LengthCounts(**facts) for facts in state["lengths"]]
        self.parts: list[dict[str, Any]] = state["parts"]
        self.position = Position(**state["position"])
        self.usable: int = state["usable"]
        self.kept: int = state["kept"]

    def add(self, encoded: Encoded, part: str) -> None:
        """Take rows of a part of the data."""
        if not encoded.num_rows:
            return
        if not self.parts or self.parts[-1]["name"] != part:
            self.parts.append({"name": part, "rows": 0, "tokens": 0})
        if self.label_counts:
            labels = encoded.columns[1][0]
            counts = np.bincount(labels[~np.isnan(labels)].astype(np.int64), minlength=len(self.label_counts))
            self.label_counts = (np.array(self.label_counts) + counts).tolist()
        rows = encoded.num_rows
        tokens = 0
        cut = np.zeros(rows, np.int64)
        names = self.format.columns
        for name, (_, stored), uncut, length_counts in zip(
            names, encoded.columns, encoded.uncut, self.lengths, strict=True
        ):
            length_counts.add(stored, uncut)
            cut += uncut - stored
            tokens += int(stored.sum()) * (name != self.format.label_column)
        self.parts[-1]["rows"] += rows
        self.parts[-1]["tokens"] += tokens
        self.counts["texts"] += rows
        self.counts["tokens"] += tokens
        self.counts["unknown_tokens"] += int(encoded.unknown.sum())
        self.counts["cut_rows"] += int(np.count_nonzero(cut))
        self.counts["cut_tokens"] += int(cut.sum())
        # Training learns the first of several right answers; rows of evaluation keep all, for the scores.
        self.writer.add(encoded.with_references() if self.keeps_references else encoded.columns)

    def state(self) -> dict[str, Any]:
        """Bring everything to disk and say how to come back to this point."""
        return {
            "writer": self.writer.state(),
            "label_counts": self.label_counts,
            "counts": self.counts,
            "lengths": [asdict(counts) for counts in self.lengths],
            "parts": self.parts,
            "position": asdict(self.position),
            "usable": self.usable,
            "kept": self.kept,
        }

    def finish(self) -> dict[str, Any]:
        """Write the last rows and say what the split holds."""
        self.writer.finish()
        self.counts["rows"] = sum(shard["rows"] for shard in self.writer.shards)
        lengths = {name: counts.facts() for name, counts in zip(self.format.columns, self.lengths, strict=True)}
        return {"counts": self.counts, "lengths": lengths, "parts": self.parts, "shards": self.writer.shards}


class Writing:
    """All splits of a job on their way to disk, from where an earlier attempt stopped.

    Args:
        folder: gets a folder per split; holds what an earlier attempt at the same job left.
        vocab_size: of the tokenizer.
    Raises:
        UserError: a file lacks a column, or is broken where its columns are named.
    """

    def __init__(self, job: Job, folder: Path, vocab_size: int) -> None:
        self.job = job
        self.folder = folder
        check_columns([*job.train, *job.validation], job.columns)
        names = [TRAIN] * bool(job.train) + [VALIDATION] * bool(job.hold_out or job.validation)
        try:
            state = saved_state(folder / PROGRESS)
            self.splits = {
                name: Split(folder / name, job, vocab_size, state and state["splits"][name]) for name in names
            }
        except (ValueError, FileNotFoundError):
            raise UserError(
                "{folder}: is damaged, how far an interrupted attempt got is not known; run the command again, it "
                "starts over",
                folder=folder / PROGRESS,
            ) from None
        self.dropped = Dropped(state["dropped"] if state else {})
        self.bad_rows = {name: BadRows(job.skip_bad_rows) for name in names}

    def run(self, tokenizer_dir: Path, workers: int) -> dict[str, Any]:
        """Encode what is not encoded yet.

        Args:
            workers: processes that encode; 0: this one does.
        Returns:
            split -> {"counts", "lengths", "parts", "shards"}, for the manifest.
        Raises:
            UserError: the data is broken, or too little to train on.
        Memory:
            some batches of rows and of encodings; 1 byte a row with `dedup`.
        """
        job = self.job
        with ExitStack() as stack:
            for split in self.splits.values():
                stack.enter_context(split.writer)
            doubles = None
            if job.train and job.dedup != "none":
                doubles = find_duplicates(
                    job.train,
                    job.columns,
                    job.examples,
                    self.folder,
                    workers,
                    max_rows=job.max_samples,
                    skip_bad_rows=job.skip_bad_rows,
                )
            encode = stack.enter_context(
                workers_in_order(load_encoder, (job.task.name, tokenizer_dir, job.examples, job.limits), workers)
            )
            if job.train:
                self._fill(TRAIN, job.train, encode, doubles)
            if job.validation:
                self._fill(VALIDATION, job.validation, encode, None)
            if not job.skip_bad_rows:
                job.task.refuse_dropped(self.dropped, _named([*job.train, *job.validation]))
            facts = {name: split.finish() for name, split in self.splits.items()}
        self._check_enough(facts)
        return facts

    def _fill(
        self, name: str, sources: Sequence[Source], encode: Run[Encoded], doubles: NDArray[np.bool_] | None
    ) -> None:
        split = self.splits[name]
        bad_rows = self.bad_rows[name]
        if split.position.source == len(sources):  # An earlier attempt came through.
            return
        most = self.job.max_samples if name == TRAIN else None
        batches = read_batches(sources, self.job.columns, bad_rows, most, split.position)
        with ProgressLine(say("preparing {split}", split=say(name)), split.position.rows) as progress:
            for batch, encoded in encode(batches):
                source = batch.end.source
                shards = self._num_shards()
                names = self.job.parts if name == TRAIN else self.job.sets
                self._add(name, names[sources[source].part] if names else "", batch, encoded, doubles)
                split.position = batch.end
                where = f"file {source + 1} of {len(sources)}" if len(sources) > 1 else ""
                progress.add(len(batch.rows), encoded.text_bytes, where)
                if self._num_shards() > shards:
                    self._save()
        split.counts["bad_rows"] = bad_rows.count
        for example in bad_rows.examples:
            self.dropped.add("broken", [example])
        if bad_rows.count:
            self.dropped.reasons["broken"]["count"] += bad_rows.count - len(bad_rows.examples)
        split.position = Position(len(sources))

    def _add(self, name: str, part: str, batch: Batch, encoded: Encoded, doubles: NDArray[np.bool_] | None) -> None:
        split = self.splits[name]
        split.counts["empty_rows"] += encoded.empty
        split.counts["dropped_rows"] += encoded.dropped.count
        self.dropped.merge(encoded.dropped)
        if doubles is not None:
            is_double = doubles[split.usable : split.usable + encoded.num_rows]
            split.counts["duplicate_rows"] += int(is_double.sum())
            for place in encoded.places[is_double].tolist():
                self.dropped.add("duplicate", batch.rows[place])
            split.usable += encoded.num_rows
            encoded = encoded.select(~is_double)
        # A conversation goes to one side whole: its prompts hold its answers.
        rows, numbers = np.unique(encoded.places, return_inverse=True)
        if name == TRAIN and self.job.hold_out:
            apart = np.array([is_held_out(split.kept + number) for number in numbers.tolist()], np.bool_)
            self.splits[VALIDATION].add(encoded.select(apart), part)
            encoded = encoded.select(~apart)
        split.kept += len(rows)
        split.add(encoded, part)

    def _num_shards(self) -> int:
        return sum(len(split.writer.shards) for split in self.splits.values())

    def _save(self) -> None:
        splits = {name: split.state() for name, split in self.splits.items()}
        save_state(self.folder / PROGRESS, {"splits": splits, "dropped": self.dropped.reasons})

    def _check_enough(self, facts: dict[str, Any]) -> None:
        """Refuse splits without rows."""
        job = self.job
        problems = [
            self._nothing_left(name, facts[TRAIN if job.hold_out else name]["counts"])
            for name in facts
            if not facts[name]["counts"]["texts"]
        ]
        # Where rows are held out, both splits have the same files.
        refuse(problems[:1] if job.hold_out else problems)

    def _nothing_left(self, name: str, counts: dict[str, int]) -> str:
        """What is said of a split without rows.

        Args:
            counts: of the rows that were read, which are counted with those of training where some are held out.
        """
        job = self.job
        remedy = say("name a file with text")
        if name == VALIDATION and job.hold_out:
            remedy = say(
                "one is held out of at least two, a conversation whole; give more text, or a --validation_file"
            )
        left_out: object = counts["dropped_rows"] + counts["duplicate_rows"]
        entries = self.dropped.reasons.items()
        reasons = ", ".join(f"{reason}: {entry['count']}" for reason, entry in entries if reason != "broken")
        if left_out and reasons:
            left_out = f"{left_out} ({reasons})"
        problem = say(
            "{files}: leaves no row for {split} (rows with text: {texts}, blank: {blank}, broken: {broken}, left out by "
            "cleaning: {left_out}); {remedy}",
            files=_named(job.validation if name == VALIDATION and job.validation else job.train),
            split=name,
            texts=counts["texts"],
            blank=counts["empty_rows"],
            broken=counts["bad_rows"],
            left_out=left_out,
            remedy=remedy,
        )
        return self.bad_rows[TRAIN if job.hold_out else name].explain(problem)


def clear(folder: Path) -> None:
    """Remove what an interrupted attempt would need; called once all else is on the disk."""
    for name in (PROGRESS, RESULT):  # The state goes first: it must not outlive what it names.
        (folder / name).unlink(missing_ok=True)
    for earlier in folder.glob("*/*.tmp"):
        earlier.unlink()


def is_held_out(number: int) -> bool:
    """Say whether a row of a file, by its number alone, is kept for validation: one of each hundred, always the second of all."""
    block, place = divmod(number, HELD_OUT_ONE_IN)
    return place == (int(mix(np.array([block], np.uint64))[0]) % HELD_OUT_ONE_IN if block else 1)


def _named(sources: Sequence[Source]) -> str:
    return str(sources[0].path) if len(sources) == 1 else f"{sources[0].path} and {len(sources) - 1} more"
