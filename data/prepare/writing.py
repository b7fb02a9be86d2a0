"""All rows of a job into shards; a killed attempt continues after the last shard that it finished.

Rows stream through: read, clean, encode (in several processes), hold out, write. A blank row is dropped, a pair that is
too long is cut by tokens with end of text as its last one; both are counted. Nothing else is lost: the token stream
keeps every token of every document. The shards depend neither on where an attempt ended nor on the number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches.order import mix
from data.prepare.duplicates import find_duplicates
from data.prepare.encode import Encoded, load_encoder
from data.prepare.passes import Position, Run, read_batches, workers_in_order
from data.progress import ProgressLine
from data.shards.store import TRAIN, VALIDATION
from data.shards.writer import ShardWriter
from data.sources.columns import Columns
from data.sources.lines import BadRows
from data.sources.reading import check_columns
from data.sources.source import Source
from data.task import RowLimits, TaskProtocol
from data.text.clean import SAMPLE_CHARS, Dropped
from data.text.conversations import Examples
from settings.errors import UserError
from support.language import say
from support.storage import OtherParts, Parts, remove

HELD_OUT_ONE_IN = 100
STATES = "states"
STATES_FORMAT = 2  # Raise it when states are written otherwise: those of an earlier version are not read.
DIGESTS = "digests"
BROKEN = "broken"  # The reason under which rows that cannot be read are listed among those that are left out.
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
BOUNDS = np.array(sorted({1, *(2 ** np.arange(1, 25)).tolist(), *(3 * 2 ** np.arange(24)).tolist()}), np.int64)


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
        facts: what else shapes the shards of this task, and not those of others.
    """

    task: TaskProtocol
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
    facts: dict[str, object] = field(default_factory=dict)


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
        self.counts = _with(self.counts, np.searchsorted(BOUNDS, lengths))

    def facts(self) -> dict[str, Any]:
        """What the manifest says; `histogram` lists [longest length of the bucket, rows] without empty buckets."""
        histogram = [[int(bound), count] for bound, count in zip(BOUNDS, self.counts, strict=False) if count]
        return {
            "longest": self.longest,
            "longest_uncut": self.longest_uncut,
            "mean": round(self.total / max(sum(self.counts), 1), 2),
            "histogram": histogram,
        }


def _with(counts: list[int], numbers: NDArray[np.int64]) -> list[int]:
    """Counts, each raised by how often its number occurs."""
    total: list[int] = (np.array(counts) + np.bincount(numbers, minlength=len(counts))).tolist()
    return total


class Split:
    """Rows of one split on their way to disk, with their counts.

    Args:
        state: what `state` returned, with all finished shards; None: a new split.
    """

    def __init__(self, folder: Path, job: Job, vocab_size: int, state: dict[str, Any] | None) -> None:
        self.format = job.task.shards
        self.keeps_references = folder.name != TRAIN
        names = job.columns.names
        state = state or {
            "writer": None,
            "label_counts": [0] * len(names or ()),
            "counts": dict.fromkeys(COUNTS, 0),
            "lengths": [{}] * len(self.format.columns),
            "parts": {},
            "position": {},
            "usable": 0,
            "unique": 0,
        }
        self.writer = ShardWriter(folder, self.format, vocab_size, state["writer"], is_regression=names == ())
        self.label_counts: list[int] = state["label_counts"]
        self.counts: dict[str, int] = state["counts"]
        self.lengths = [LengthCounts(**facts) for facts in state["lengths"]]
        self.parts: dict[str, dict[str, Any]] = state["parts"]
        self.position = Position(**state["position"])
        self.usable: int = state["usable"]  # Examples that were read, duplicates among them.
        self.unique: int = state["unique"]  # Rows that were read, without duplicates.
        self._num_saved = len(self.writer.shards)

    def add(self, encoded: Encoded, part: str) -> None:
        """Take rows of a part of the data."""
        rows = encoded.num_rows
        if not rows:
            return
        tokens = 0
        cut = np.zeros(rows, np.int64)
        columns = zip(self.format.columns, encoded.columns, encoded.uncut, self.lengths, strict=True)
        for name, (values, lengths), uncut, length_counts in columns:
            length_counts.add(lengths, uncut)
            cut += uncut - lengths
            if name != self.format.label_column:
                tokens += int(lengths.sum())
            elif self.label_counts:
                self.label_counts = _with(self.label_counts, values[~np.isnan(values)].astype(np.int64))
        counts_of_part = self.parts.setdefault(part, {"name": part, "rows": 0, "tokens": 0})
        counts_of_part["rows"] += rows
        counts_of_part["tokens"] += tokens
        self.counts["texts"] += encoded.num_texts
        self.counts["tokens"] += tokens
        self.counts["unknown_tokens"] += int(encoded.unknown.sum())
        self.counts["cut_rows"] += int(np.count_nonzero(cut))
        self.counts["cut_tokens"] += int(cut.sum())
        # Training learns the first of several right answers; rows of evaluation keep all, for the scores.
        self.writer.add(encoded.with_references() if self.keeps_references else encoded.columns)

    def state(self) -> dict[str, Any]:
        """Bring everything to disk and say how to come back to this point.

        Of the finished shards only those that no earlier state lists are listed.
        """
        writer = self.writer.state()
        writer["shards"] = writer["shards"][self._num_saved :]
        self._num_saved = len(self.writer.shards)
        return {
            "writer": writer,
            "label_counts": self.label_counts,
            "counts": self.counts,
            "lengths": [asdict(counts) for counts in self.lengths],
            "parts": self.parts,
            "position": asdict(self.position),
            "usable": self.usable,
            "unique": self.unique,
        }

    def finish(self) -> dict[str, Any]:
        """Write the last rows and say what the split holds."""
        self.writer.finish()
        self.counts["rows"] = sum(shard["rows"] for shard in self.writer.shards)
        lengths = {name: counts.facts() for name, counts in zip(self.format.columns, self.lengths, strict=True)}
        parts = list(self.parts.values())
        return {"counts": self.counts, "lengths": lengths, "parts": parts, "shards": self.writer.shards}


def clear(folder: Path) -> None:
    """Remove what only an interrupted attempt would need; called once all else is on the disk."""
    for temporary in folder.glob("*/*.tmp"):
        temporary.unlink()
    remove(folder / DIGESTS)
    remove(folder / STATES)


class Writing:
    """All splits of a job on their way to disk, from where an earlier attempt stopped.

    Args:
        folder: gets a folder per split; what attempts at another job have left there is removed.
        identity: of the job. vocab_size: of the tokenizer.
    Raises:
        UserError: a file lacks a column, or is broken where its columns are named.
    """

    def __init__(self, job: Job, folder: Path, identity: str, vocab_size: int) -> None:
        self.job = job
        self.bad_rows = BadRows(job.skip_bad_rows)
        check_columns([*job.train, *job.validation], job.columns)
        has_split = {TRAIN: job.train, VALIDATION: job.hold_out or job.validation}
        names = [name for name, has_rows in has_split.items() if has_rows]
        states_identity = f"{identity} {STATES_FORMAT}"
        earlier = list[int]()
        with suppress(OtherParts):
            self.states = Parts(folder / STATES, states_identity, ".json")
            earlier = list(self.states)
        if not earlier:
            remove(folder)
            self.states = Parts(folder / STATES, states_identity, ".json")
        self.digests = Parts(folder / DIGESTS, identity, ".bin")
        try:
            state = self._last_state(names, earlier)
            self.splits = {name: Split(folder / name, job, vocab_size, state["splits"][name]) for name in names}
        except (ValueError, FileNotFoundError):
            remove(folder / STATES)
            raise UserError(
                "{folder}: is damaged, how far an interrupted attempt got is not known; run the command again, it "
                "starts over",
                folder=folder,
            ) from None
        self.dropped = Dropped(state["dropped"])
        if not earlier:  # The first state says whose folder this is.
            self._save()

    def _last_state(self, names: Sequence[str], earlier: Sequence[int]) -> dict[str, Any]:
        """The last of the earlier states, with the finished shards of all of them; without any, that of a beginning.

        Raises:
            ValueError: one between is missing.
        """
        state: dict[str, Any] = {"splits": dict.fromkeys(names), "dropped": {}}
        shards: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in earlier:
            state = json.loads(self.states.path(number).read_bytes())
            for name in names:
                shards[name] += state["splits"][name]["writer"]["shards"]
                state["splits"][name]["writer"]["shards"] = shards[name]
        if sum(map(len, shards.values())) != max(earlier, default=0):
            raise ValueError("a state is missing")
        return state

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
            if job.dedup != "none":
                doubles = find_duplicates(
                    job.train,
                    job.columns,
                    job.examples,
                    self.digests,
                    workers,
                    max_rows=job.max_samples,
                    skip_bad_rows=job.skip_bad_rows,
                )
            encoder = (job.task.name, tokenizer_dir, job.examples, job.limits)
            encode = stack.enter_context(workers_in_order(load_encoder, encoder, workers))
            if job.train:
                self._fill(TRAIN, job.train, job.parts, job.max_samples, encode, doubles)
            if job.validation:
                self._fill(VALIDATION, job.validation, job.sets, None, encode, None)
            return {name: split.finish() for name, split in self.splits.items()}

    def _fill(
        self,
        name: str,
        sources: Sequence[Source],
        parts: Sequence[str],
        max_rows: int | None,
        encode: Run[Encoded],
        doubles: NDArray[np.bool_] | None,
    ) -> None:
        """Read all rows of sources into a split, and of training data those that are held out into the other one."""
        job = self.job
        split = self.splits[name]
        if split.position.source == len(sources):  # An earlier attempt came through.
            return
        batches = read_batches(sources, job.columns, self.bad_rows, max_rows, split.position)
        with ProgressLine(say("preparing {split}", split=say(name)), split.position.rows) as progress:
            for batch, encoded in encode(batches):
                source = batch.end.source
                part = parts[sources[source].part] if parts else ""
                num_shards = self._num_shards()
                split.counts["empty_rows"] += encoded.empty
                split.counts["dropped_rows"] += encoded.dropped.count
                self.dropped.merge(encoded.dropped)
                rows = encoded
                if doubles is not None:
                    is_double = doubles[split.usable : split.usable + encoded.num_rows]
                    split.usable += encoded.num_rows
                    split.counts["duplicate_rows"] += int(is_double.sum())
                    for index in encoded.row_indices[is_double].tolist():
                        self.dropped.add("duplicate", batch.rows[index])
                    rows = encoded.select(~is_double)
                # A conversation goes to one side whole: its prompts hold its answers.
                distinct, numbers = np.unique(rows.row_indices, return_inverse=True)
                if job.hold_out:
                    held_out = is_held_out(split.unique + numbers)
                    self.splits[VALIDATION].add(rows.select(held_out), part)
                    rows = rows.select(~held_out)
                split.unique += len(distinct)
                split.add(rows, part)
                split.position = batch.end
                file = f"file {source + 1} of {len(sources)}" if len(sources) > 1 else ""
                progress.add(len(batch.rows), encoded.text_bytes, file)
                if self._num_shards() > num_shards:
                    self._save()
        split.position = Position(len(sources))
        split.counts["bad_rows"] = self.bad_rows.count
        if self.bad_rows.count:
            samples = [example[:SAMPLE_CHARS] for example in self.bad_rows.examples]
            self.dropped.merge(Dropped({BROKEN: {"count": self.bad_rows.count, "samples": samples}}))
        files = str(sources[0].path) if len(sources) == 1 else f"{sources[0].path} and {len(sources) - 1} more"
        if not job.skip_bad_rows:
            job.task.refuse_dropped(self.dropped, files)
        self._check_enough(name, split.counts, files, say("name a file with text"))
        if job.hold_out:
            remedy = "one is held out of at least two, a conversation whole; give more text, or a --validation_file"
            self._check_enough(VALIDATION, split.counts, files, say(remedy))

    def _num_shards(self) -> int:
        return sum(len(split.writer.shards) for split in self.splits.values())

    def _save(self) -> None:
        """Write how far all splits have come, under the number of shards that are finished."""
        splits = {name: split.state() for name, split in self.splits.items()}
        with self.states.write(self._num_shards()) as path:
            path.write_text(json.dumps({"splits": splits, "dropped": self.dropped.reasons}), encoding="utf8")

    def _check_enough(self, split: str, counts: dict[str, int], files: str, remedy: str) -> None:
        """Refuse a split without rows.

        Args:
            counts: what became of the rows of the files.
        Raises:
            UserError: it has none.
        """
        if self.splits[split].counts["texts"]:
            return
        left_out = str(counts["dropped_rows"] + counts["duplicate_rows"])
        if left_out != "0":
            reasons = self.dropped.reasons.items()
            causes = ", ".join(f"{reason}: {entry['count']}" for reason, entry in reasons if reason != BROKEN)
            left_out += f" ({causes})"
        problem = say(
            "{files}: leaves no row for {split} (rows with text: {texts}, blank: {blank}, broken: {broken}, left out "
            "by cleaning: {left_out}); {remedy}",
            files=files,
            split=split,
            texts=counts["texts"],
            blank=counts["empty_rows"],
            broken=counts["bad_rows"],
            left_out=left_out,
            remedy=remedy,
        )
        raise UserError(self.bad_rows.explain(problem))


def is_held_out(numbers: NDArray[np.int64] | int) -> NDArray[np.bool_]:
    """Say which rows of a file, by their numbers alone, are kept for validation: one of each hundred, always the second
    of all.
    """
    blocks, offsets = np.divmod(np.atleast_1d(numbers), HELD_OUT_ONE_IN)
    chosen = mix(blocks.astype(np.uint64)) % np.uint64(HELD_OUT_ONE_IN)
    is_chosen: NDArray[np.bool_] = offsets == np.where(blocks > 0, chosen, 1)
    return is_chosen
