"""How do all rows of a job get into shards, and how does a killed attempt go on?

Rows stream through: read, clean, encode (in several processes), hold out, spool, write. A blank row is dropped, a pair
that is too long is cut by tokens with end of text as its last one; both are counted. Nothing else is lost: the token
stream keeps every token of every document. Every few seconds the state is saved: how many batches of which file are done,
the counts, and the sizes of the spools. The shards do not depend on where that happened, nor on the number of processes.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches.lengths import LengthCounts
from data.batches.objectives import Lengths
from data.batches.order import mix
from data.prepare.encoder import Encoded, make_encoder
from data.prepare.pace import Pace
from data.prepare.spool import Spool
from data.prepare.workers import in_order
from data.shards.store import COLUMNS, PAIRS, PREFERENCES, TRAIN, VALIDATION
from data.sources.chunks import Chunk, Point, chunks
from data.sources.files import Source
from data.sources.layouts import Columns
from data.sources.lines import BadRows
from data.sources.reading import Row, check_columns
from data.text.clean import Dropped
from data.text.conversations import Examples
from data.text.duplicates import RESULT, find_duplicates
from data.text.preferences import check_answers
from language import say
from settings.errors import UserError
from storage import rename

HELD_OUT_ONE_IN = 100
CHECKPOINT_SECONDS = 3.0
PROGRESS = "progress.json"
COUNTS = (
    "rows", "tokens", "texts", "bad_rows", "empty_rows", "cut_rows", "cut_tokens", "unknown_tokens", "dropped_rows",
    "duplicate_rows",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is to be encoded.

    Args:
        kind: stream, pairs or preferences; columns: what rows are made of.
        train: sources, all of them for training, or with `hold_out` one row in a hundred for validation; may be none.
        validation: sources of the validation split; may be none.
        lengths: pairs and preferences are cut to these.
        max_samples: rows of `train` that are read; None: all.
        parts: the names of the parts that `Source.part` counts.
        examples: how a row becomes the texts that are encoded; with turns, one row may become several.
        dedup: none, exact or near; duplicates are looked for in `train`.
    """

    kind: str
    columns: Columns
    train: Sequence[Source]
    validation: Sequence[Source]
    hold_out: bool
    lengths: Lengths
    max_samples: int | None
    skip_bad_rows: bool
    shard_rows: int
    parts: Sequence[str] = ("",)
    examples: Examples = field(default_factory=Examples)
    dedup: str = "none"

    @property
    def longest(self) -> tuple[int | None, ...]:
        """Per column, the most tokens with end of text."""
        inputs, targets = self.lengths.input_tokens, self.lengths.target_tokens
        limits = {PAIRS: (inputs, targets), PREFERENCES: (inputs, targets, targets)}
        return limits.get(self.kind, (None,))


class Split:
    """Rows of one split on their way to disk, with their counts.

    Args:
        state: what `state` returned; None: a new split.
    """

    def __init__(self, folder: Path, job: Job, vocab_size: int, state: dict[str, Any] | None) -> None:
        self.kind = job.kind
        self.spool = Spool(folder, job.kind, vocab_size, job.shard_rows, state["spool"] if state else None)
        self.counts: dict[str, int] = dict(state["counts"]) if state else dict.fromkeys(COUNTS, 0)
        lengths = state["lengths"] if state else [{} for _ in COLUMNS[job.kind]]
        self.lengths = [LengthCounts(**facts) for facts in lengths]
        self.parts = [dict(part) for part in state["parts"]] if state else []

    def add(self, encoded: Encoded, part: str) -> None:
        """Append rows that belong to a part."""
        if not self.parts or self.parts[-1]["name"] != part:
            self.parts.append({"name": part, "rows": 0, "tokens": 0})
        tokens = sum(len(ids) for ids, _ in encoded.columns)
        stored = [lengths for _, lengths in encoded.columns]
        cut = [uncut - kept for uncut, kept in zip(encoded.uncut, stored, strict=True)]
        self.parts[-1]["rows"] += encoded.num_rows
        self.parts[-1]["tokens"] += tokens
        for counts, kept, uncut in zip(self.lengths, stored, encoded.uncut, strict=True):
            counts.add(kept, uncut)
        self._count(texts=encoded.num_rows, tokens=tokens, unknown_tokens=int(encoded.unknown.sum()))
        per_row = np.sum(cut, axis=0)
        self._count(cut_rows=int(np.count_nonzero(per_row)), cut_tokens=int(per_row.sum()))
        self.spool.add(encoded.columns)

    def _count(self, **more: int) -> None:
        for name, count in more.items():
            self.counts[name] += count

    def state(self) -> dict[str, Any]:
        """Bring everything to disk and say how to come back to this point."""
        lengths = [asdict(counts) for counts in self.lengths]
        return {"spool": self.spool.state(), "counts": self.counts, "lengths": lengths, "parts": self.parts}

    def finish(self) -> dict[str, Any]:
        """Write the last rows and say what the split holds."""
        self.spool.finish()
        self.counts["rows"] = self.spool.num_rows
        names = COLUMNS[self.kind]
        lengths = {name: counts.facts() for name, counts in zip(names, self.lengths, strict=True)}
        return {"counts": self.counts, "lengths": lengths, "parts": self.parts, "shards": self.spool.shards}


class Writing:
    """All splits of a job on their way to disk; `run` fills them, from where an earlier attempt stopped.

    Args:
        folder: gets a folder per split; holds what an earlier attempt at the same job left.
        vocab_size: of the tokenizer.
    Raises:
        UserError: a file lacks a column, or is broken where its columns are named.
    """

    def __init__(self, job: Job, folder: Path, vocab_size: int) -> None:
        self.job, self.folder = job, folder
        check_columns([*job.train, *job.validation], job.columns)
        state = _saved_state(folder)
        names = [TRAIN] * bool(job.train) + [VALIDATION] * (job.hold_out or bool(job.validation))
        saved = state["splits"] if state else {}
        self.splits = {name: Split(folder / name, job, vocab_size, saved.get(name)) for name in names}
        self.dropped = Dropped(state["dropped"] if state else {})
        self.points = {name: Point(**point) for name, point in state["points"].items()} if state else {}
        self._saved_at = time.monotonic()

    def run(self, tokenizer_dir: Path, workers: int) -> dict[str, Any]:
        """Encode what is not encoded yet.

        Args:
            workers: processes that encode; 0: this one does.
        Returns:
            split -> {"counts", "lengths", "parts", "shards"}, for the manifest.
        Raises:
            UserError: the data is broken, or too little to train on.
        Memory:
            some batches of rows and of encodings; 1 bit a row with `dedup`.
        """
        job = self.job
        arguments = (tokenizer_dir, job.examples, job.longest)
        with ExitStack() as stack:
            for split in self.splits.values():
                stack.enter_context(split.spool)
            encode = stack.enter_context(in_order(make_encoder, arguments, workers))
            if job.train:
                doubles = self._duplicates(workers)
                self._fill(TRAIN, job.train, encode, job.max_samples, doubles, VALIDATION if job.hold_out else None)
            if job.validation:
                self._fill(VALIDATION, job.validation, encode, None, None, None)
            if not job.skip_bad_rows:
                check_answers(self.dropped, _named([*job.train, *job.validation]))
            facts = {name: split.finish() for name, split in self.splits.items()}
        _check_enough(job, facts)
        return facts

    def _duplicates(self, workers: int) -> NDArray[np.bool_] | None:
        job = self.job
        if job.dedup == "none":
            return None
        return find_duplicates(
            job.train, job.columns, job.dedup, job.examples, self.folder, workers,
            max_rows=job.max_samples, skip_bad_rows=job.skip_bad_rows,
        )  # fmt: skip

    def _fill(
        self, name: str, sources: Sequence[Source], encode: Any, max_rows: int | None,
        doubles: NDArray[np.bool_] | None, held_out: str | None,
    ) -> None:  # fmt: skip
        bad_rows = BadRows(self.job.skip_bad_rows)
        point = self.points.setdefault(name, Point())
        if point.source == len(sources):  # an earlier attempt came through
            return
        coming = chunks(sources, self.job.columns, bad_rows, max_rows, point)
        with closing(Pace(say("preparing {split}", split=name), point.read)) as pace:
            for chunk, encoded in encode(coming, lambda chunk: chunk.rows):
                self._take(name, held_out, sources[chunk.source], chunk, encoded, point, doubles)
                chunk.move(point)
                where = f"file {chunk.source + 1} of {len(sources)}" if len(sources) > 1 else ""
                pace.add(len(chunk.rows), encoded.text_bytes, where)
                if time.monotonic() - self._saved_at >= CHECKPOINT_SECONDS:
                    self._save()
        self.splits[name].counts["bad_rows"] = bad_rows.count
        for example in bad_rows.examples:
            self.dropped.add("broken", [example])
        if bad_rows.count > len(bad_rows.examples):
            self.dropped.reasons["broken"]["count"] += bad_rows.count - len(bad_rows.examples)
        point.source = len(sources)
        self._save()

    def _take(
        self, name: str, held_out: str | None, source: Source, chunk: Chunk, encoded: Encoded, point: Point,
        doubles: NDArray[np.bool_] | None,
    ) -> None:  # fmt: skip
        """Give each row of a batch to its split."""
        counts = self.splits[name].counts
        counts["empty_rows"] += encoded.empty
        counts["dropped_rows"] += encoded.dropped.count
        self.dropped.merge(encoded.dropped)
        if doubles is not None:
            is_double = doubles[point.usable : point.usable + encoded.num_rows]
            counts["duplicate_rows"] += int(is_double.sum())
            for place in encoded.places[is_double].tolist():
                self.dropped.add("duplicate", chunk.rows[place])
            point.usable += encoded.num_rows
            encoded = encoded.select(~is_double)
        part = self.job.parts[source.part] if name == TRAIN else ""
        apart = np.zeros(encoded.num_rows, np.bool_)
        numbers, came_in = encoded.numbered()  # a conversation goes to one side whole: its prompts hold its answers
        if held_out is not None:
            apart = np.array([is_held_out(point.kept + number) for number in numbers.tolist()], np.bool_)
        point.kept += came_in
        if held_out is not None and apart.any():
            self.splits[held_out].add(encoded.select(apart), part)
        if not apart.all():
            self.splits[name].add(encoded.select(~apart), part)

    def _save(self) -> None:
        splits = {name: split.state() for name, split in self.splits.items()}
        points = {name: asdict(point) for name, point in self.points.items()}
        state = json.dumps({"splits": splits, "points": points, "dropped": self.dropped.reasons})
        fresh = self.folder / f"{PROGRESS}.tmp"
        fresh.write_text(f"{zlib.crc32(state.encode()):08x}{state}", encoding="utf8")
        rename(fresh, self.folder / PROGRESS)
        for split in self.splits.values():
            split.spool.forget()
        self._saved_at = time.monotonic()


def clear(folder: Path) -> None:
    """Remove what an interrupted attempt would need; called once all else is on the disk."""
    for name in (PROGRESS, RESULT):  # the state first: it must not outlive what it names
        (folder / name).unlink(missing_ok=True)
    for spool in folder.glob("*/.*.*"):
        spool.unlink()


def _saved_state(folder: Path) -> dict[str, Any] | None:
    """How far an earlier attempt got; None: there was none. The state has its checksum before it."""
    try:
        content = (folder / PROGRESS).read_bytes()
    except FileNotFoundError:
        return None
    if f"{zlib.crc32(content[8:]):08x}".encode() != content[:8]:
        raise UserError(
            f"{folder / PROGRESS}: is damaged, how far an interrupted attempt got is not known; run the command again, it "
            "starts over"
        )
    return dict(json.loads(content[8:]))


def limited(batches: Iterable[list[Row]], max_rows: int | None) -> Iterator[list[Row]]:
    """Give batches until `max_rows` rows have come."""
    left = max_rows
    for batch in batches:
        if left is not None:
            batch = batch[:left]
            left -= len(batch)
        yield batch
        if left == 0:
            return


def is_held_out(number: int) -> bool:
    """Say whether a row of a file, by its number alone, is kept for validation: one of each hundred, always the second of all."""
    block, place = divmod(number, HELD_OUT_ONE_IN)
    return place == (int(mix(np.array([block], np.uint64))[0]) % HELD_OUT_ONE_IN if block else 1)


def _check_enough(job: Job, facts: dict[str, Any]) -> None:
    problems = []
    for name, sources in ((TRAIN, job.train), (VALIDATION, job.validation or job.train)):
        if name in facts and not facts[name]["counts"]["texts"]:
            counts = facts.get(TRAIN, facts[name])["counts"]
            left_out = counts["dropped_rows"] + counts["duplicate_rows"]
            seen = f"rows with text: {counts['texts']}, blank: {counts['empty_rows']}, broken: {counts['bad_rows']}"
            seen += f", left out by cleaning: {left_out}" if left_out else ""
            problems.append(
                f"{_named(sources)}: leaves no row for {name} ({seen}); {_remedy(name, bool(job.validation))}"
            )
            if not job.validation:  # which takes its rows from the same files
                break
    if problems:
        raise UserError(*problems)


def _named(sources: Sequence[Source]) -> str:
    return str(sources[0].path) if len(sources) == 1 else f"{sources[0].path} and {len(sources) - 1} more"


def _remedy(split: str, separate_file: bool) -> str:
    if split == TRAIN or separate_file:
        return "name a file with text"
    return "one is held out of at least two, a conversation whole; name more text, or a --validation_file"
