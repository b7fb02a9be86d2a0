"""Token rows on disk: what a shards folder holds, and whether it is still what `prepare` has written.

A shards folder holds `manifest.json`, `tokenizer/` and one folder per split (`train/`, `validation/`) of Arrow IPC
files, 128 rows a record batch, so that one row can be read without touching much else. Which columns these have says
the task that reads them (`data.task.ShardFormat`).

The manifest, which holds the CRC-32 of every file, is written last, into a folder that is then renamed: where there is
a manifest, all is there. A run compares the checksums once, before its first row: a flipped bit in a token would be
learnt and never be seen. CRC-32 finds damage, not intent: whoever can write the shard can write the manifest.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.batches.rows import SpecialIds
from data.progress import ProgressLine
from data.task import TaskProtocol, shard_readers
from settings.errors import UserError, refuse
from support.language import join, say
from support.storage import MOST_TABLE_BYTES, PIECE_BYTES, read_text

FORMAT = 3
MANIFEST = "manifest.json"
TRAIN = "train"
VALIDATION = "validation"
TOKENIZER = "tokenizer"
BATCH_ROWS = 128
LengthFacts = dict[str, Any]
_sound: set[tuple[str, int, int]] = set()  # path, size and time of change of files that were checked


@dataclass(frozen=True)
class Manifest:
    """What a shards folder says of itself.

    Args:
        root: the folder; content: the JSON object of `manifest.json`.
    """

    root: Path
    content: dict[str, Any]

    @classmethod
    def read(cls, root: Path) -> Manifest:
        """Read and check `root/manifest.json`.

        Raises:
            UserError: it is missing, broken, or of another format.
        """
        try:
            content = json.loads(read_text(root / MANIFEST, MOST_TABLE_BYTES))
        except FileNotFoundError:
            raise UserError(
                "{root}: is not a shards folder, it has no {manifest}; write one with the prepare command",
                root=root,
                manifest=MANIFEST,
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                "{root}: cannot be read ({error}); delete the folder and prepare it again",
                root=root / MANIFEST,
                error=error,
            ) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(
                "{root}: is of another format than {format}; delete the folder and prepare it again",
                root=root / MANIFEST,
                format=FORMAT,
            )
        name = next(_wrong(content, FIELDS, "it"), None if content.get("splits") else "splits")
        if name is not None:
            raise UserError(
                "{root}: {name} is not what belongs there; copy the folder again, or delete it and prepare it again",
                root=root / MANIFEST,
                name=name,
            )
        return cls(root, content)

    @classmethod
    def of(cls, path: Path) -> Manifest:
        """Read the manifest of a shards folder, or of the folder of a split."""
        return cls.read(path if (path / MANIFEST).is_file() else path.parent)

    @property
    def kind(self) -> str:
        """How its rows are stored: `data.task.ShardFormat.kind`."""
        return str(self.content["kind"])

    @property
    def task(self) -> TaskProtocol:
        """The task that reads such rows, of several the first."""
        return shard_readers()[self.kind]

    @property
    def label_names(self) -> tuple[str, ...]:
        """Of rows with labels, their names; none where they are numbers."""
        return tuple(self.content["labels"])

    def label_counts(self, split: str) -> tuple[int, ...]:
        """How often each label occurs in a split, in the order of their names."""
        return tuple(self.content["label_counts"][split])

    @property
    def special(self) -> SpecialIds:
        """Ids of end of text, padding and sentinels."""
        facts = self.content["tokenizer"]
        return SpecialIds(facts["eos_id"], facts["pad_id"], tuple(facts["sentinel_ids"]))

    def counts(self, split: str) -> dict[str, int]:
        """Rows and tokens of a split, and what was dropped and cut."""
        return dict(self._split(split)["counts"])

    def lengths(self, split: str) -> dict[str, LengthFacts]:
        """How long the rows of a split are: column -> `longest`, `longest_uncut`, `mean`, `histogram`."""
        return dict(self._split(split)["lengths"])

    def parts(self, split: str) -> list[dict[str, Any]]:
        """The parts that were named apart: `name`, `rows` and `tokens` of each, in their order."""
        return list(self._split(split)["parts"])

    def _split(self, name: str) -> dict[str, Any]:
        splits = self.content["splits"]
        if name not in splits:
            raise UserError(
                "{root}: holds no {name} rows, only {splits}; give others with --{name}_file",
                root=self.root,
                name=name,
                splits=join(", ", splits),
            )
        return dict(splits[name])

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer: the highest one and 1."""
        return int(self.content["tokenizer"]["size"])

    def files(self, split: str) -> list[Path]:
        """The shard files of a split.

        Raises:
            UserError: one is missing.
        """
        paths = [self.root / split / shard["file"] for shard in self._split(split)["shards"]]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise UserError(
                "{missing}: is missing, the manifest lists it; delete {root} and prepare it again",
                missing=missing[0],
                root=self.root,
            )
        return paths


def list_lengths(paths: Sequence[Path], columns: Sequence[str]) -> list[NDArray[np.int64]]:
    """How long the cells of columns of shard files are, (rows,) each; of the cells themselves nothing is read."""
    parts: list[list[NDArray[np.int64]]] = [[np.zeros(0, np.int64)] for _ in columns]
    for path in paths:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                for lengths, name in zip(parts, columns, strict=True):
                    lengths.append(np.diff(batch.column(name).offsets.to_numpy()).astype(np.int64))
    return [np.concatenate(lengths) for lengths in parts]


def _is_count(value: Any) -> bool:
    """Ids, rows and bytes are whole numbers, none below 0."""
    return type(value) is int and 0 <= value < 2**62


def _is_file_name(value: Any) -> bool:
    """A file in the folder itself, in no other place."""
    return isinstance(value, str) and value == Path(value).name and value not in ("", ".", "..")


def _is_kind(value: Any) -> bool:
    return value in list(shard_readers())


# What a manifest must hold: a type or a test, [what each member is], or {name: what it is}; "*" is every name.
_LENGTHS = {"longest": _is_count, "longest_uncut": _is_count, "mean": (int, float), "histogram": list}
_SPLIT = {
    "counts": {"*": _is_count},
    "lengths": {"*": _LENGTHS},
    "parts": [{"name": str, "rows": _is_count, "tokens": _is_count}],
    "shards": [{"file": _is_file_name, "rows": _is_count, "crc32": _is_count}],
}
_TOKENIZER = {
    "fingerprint": str,
    "size": _is_count,
    "pad_id": _is_count,
    "eos_id": _is_count,
    "sentinel_ids": [_is_count],
}
FIELDS = {
    "kind": _is_kind,
    "fingerprint": str,
    "splits": {"*": _SPLIT},
    "dropped": {"*": {"count": _is_count, "samples": [str]}},
    "labels": [str],
    "label_counts": {"*": [_is_count]},
    "tokenizer": _TOKENIZER,
}


def _wrong(value: Any, expected: Any, name: str) -> Iterator[str]:
    """The names of what is not as expected in a value."""
    match expected, value:
        case {"*": each}, dict():
            for key, member in value.items():
                yield from _wrong(member, each, key)
        case dict(), dict():
            for key, each in expected.items():
                yield from _wrong(value.get(key), each, key)
        case [each], list():
            for member in value:
                yield from _wrong(member, each, name)
        case (type() | tuple(), _) if isinstance(value, expected):
            pass
        case is_sound, _ if isinstance(is_sound, FunctionType) and is_sound(value):
            pass
        case _:
            yield name


def is_shards(path: str | Path) -> bool:
    """Whether a path is a shards folder or one of its splits."""
    path = Path(path)  # or a list of files, which may be too long for the name of one: `Path.is_file` would raise
    is_split = path.name in (TRAIN, VALIDATION) and os.path.isfile(path.parent / MANIFEST)
    return os.path.isfile(path / MANIFEST) or is_split


def check_shards(*split_dirs: Path) -> None:
    """Compare the files of splits with their checksums, once in a process.

    Raises:
        UserError: names the damaged and the missing files. OSError: one cannot be read.
    Memory: 1 MiB.
    """
    problems = list[str]()
    with ProgressLine(say("checking shards")) as progress:
        for split_dir in split_dirs:
            manifest = Manifest.of(split_dir)
            paths = manifest.files(split_dir.name)
            listed = manifest.content["splits"][split_dir.name]["shards"]
            for path, shard in zip(paths, listed, strict=True):
                state = path.stat()
                version = (str(path), state.st_size, state.st_mtime_ns)
                if version in _sound:
                    continue
                checksum = _checksum(path, progress)
                progress.add(shard["rows"], 0, path.name)
                if checksum == shard["crc32"]:
                    _sound.add(version)
                    continue
                problems.append(
                    say(
                        "{path}: is damaged, its checksum is {found:08x} and was {crc32:08x} when it was written; "
                        "copy it again, or delete {root} and prepare it again",
                        path=path,
                        found=checksum,
                        crc32=shard["crc32"],
                        root=manifest.root,
                    )
                )
    refuse(problems)


def _checksum(path: Path, progress: ProgressLine) -> int:
    piece = memoryview(bytearray(PIECE_BYTES))
    checksum = 0
    with io.FileIO(path) as file:
        while size := file.readinto(piece):
            checksum = zlib.crc32(piece[:size], checksum)
            progress.add(0, size, path.name)
    return checksum
