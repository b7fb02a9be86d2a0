"""How do token rows lie on disk?

A shards folder holds `manifest.json`, `tokenizer/` and one folder per split (`train/`, `validation/`) of Arrow IPC
files,
128 rows a record batch, so that one row can be read without touching much else. Two kinds:

- stream: column `tokens`; all documents one after the other, end of text between them, cut into rows of 512 tokens;
- pairs: columns `input_ids` and `labels`, each with end of text.

The manifest is written last, into a folder that is then renamed: where there is a manifest, all is there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.objectives import SpecialIds
from data.row_access import ROWS_PER_BATCH_KEY
from data.tokenizer import Tokenizer
from settings import UserError

FORMAT = 1
MANIFEST = "manifest.json"
TRAIN, VALIDATION, TOKENIZER = "train", "validation", "tokenizer"
STREAM, PAIRS = "stream", "pairs"
COLUMNS = {STREAM: ("tokens",), PAIRS: ("input_ids", "labels")}
ROW_TOKENS = 512
BATCH_ROWS = 128


class ShardWriter:
    """Writes token rows into numbered Arrow IPC files of one split. Use it as a context manager, and `finish` it.

    Args:
        folder: made if it is not there.
        kind: "stream" or "pairs".
        vocab_size: ids below 65,536 are stored in two bytes, others in four.
        shard_rows: rows of one file.
    Memory:
        128 rows.
    """

    def __init__(self, folder: Path, kind: str, vocab_size: int, shard_rows: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shard_rows = folder, shard_rows
        self.dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        fields = [pa.field(name, pa.list_(pa.from_numpy_dtype(self.dtype))) for name in COLUMNS[kind]]
        self.schema = pa.schema(fields, metadata={ROWS_PER_BATCH_KEY: str(BATCH_ROWS).encode()})
        self.shards: list[dict[str, Any]] = []
        self._columns: list[list[NDArray[Any]]] = [[] for _ in fields]
        self._file: pa.ipc.RecordBatchFileWriter | None = None

    def add(self, *row: NDArray[Any]) -> None:
        """Write one row: an id array per column."""
        for column, ids in zip(self._columns, row, strict=True):
            column.append(ids)
        if len(self._columns[0]) == BATCH_ROWS:
            self._write_batch()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def finish(self) -> None:
        """Write the rows that are still held."""
        if self._columns[0]:
            self._write_batch()
        self._close()

    @property
    def num_rows(self) -> int:
        """Rows written so far."""
        return sum(shard["rows"] for shard in self.shards) + len(self._columns[0])

    def _write_batch(self) -> None:
        if self._file is None:
            name = f"{len(self.shards):05d}.arrow"
            self.shards.append({"file": name, "rows": 0})
            self._file = pa.ipc.new_file(str(self.folder / name), self.schema)
        arrays = [_list_array(column, self.dtype) for column in self._columns]
        self._file.write_batch(pa.record_batch(arrays, schema=self.schema))
        self.shards[-1]["rows"] += len(arrays[0])
        for column in self._columns:
            column.clear()
        if self.shards[-1]["rows"] >= self.shard_rows:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _list_array(rows: Sequence[NDArray[Any]], dtype: type) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows).astype(dtype)))


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
            content = json.loads((root / MANIFEST).read_text(encoding="utf8"))
        except FileNotFoundError:
            raise UserError(
                f"{root}: is no shards folder, it has no {MANIFEST}; write one with the prepare command"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{root / MANIFEST}: cannot be read ({error}); delete the folder and prepare it anew"
            ) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(
                f"{root / MANIFEST}: is of another format than {FORMAT}; delete the folder and prepare it anew"
            )
        return cls(root, content)

    @classmethod
    def of(cls, path: Path) -> Manifest:
        """Read the manifest of a shards folder, or of the folder that a split lies in."""
        return cls.read(path if (path / MANIFEST).is_file() else path.parent)

    @property
    def kind(self) -> str:
        """stream or pairs."""
        return str(self.content["kind"])

    @property
    def special(self) -> SpecialIds:
        """Ids of end of text, padding and sentinels."""
        facts = self.content["tokenizer"]
        return SpecialIds(facts["eos_id"], facts["pad_id"], tuple(facts["sentinel_ids"]))

    def counts(self, split: str) -> dict[str, int]:
        """Rows and tokens of a split, and what was dropped and cut."""
        return dict(self._split(split)["counts"])

    def _split(self, name: str) -> dict[str, Any]:
        splits = self.content["splits"]
        if name not in splits:
            raise UserError(
                f"{self.root}: holds no {name} rows, only {', '.join(splits)}; name others with --{name}_file"
            )
        return dict(splits[name])

    def files(self, split: str) -> list[Path]:
        """The shard files of a split.

        Raises:
            UserError: one is missing.
        """
        paths = [self.root / split / shard["file"] for shard in self._split(split)["shards"]]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise UserError(f"{missing[0]}: is missing, the manifest lists it; delete {self.root} and prepare it anew")
        return paths


def is_shards(path: str | Path) -> bool:
    """Whether a path is a shards folder or one of its splits."""
    path = Path(path)
    return (path / MANIFEST).is_file() or (path.name in (TRAIN, VALIDATION) and (path.parent / MANIFEST).is_file())


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """What the manifest notes of the tokenizer, so that training needs not load it."""
    return {
        "fingerprint": tokenizer.fingerprint, "size": tokenizer.size, "pad_id": tokenizer.pad_id,
        "eos_id": tokenizer.eos_id, "unk_id": tokenizer.unk_id, "sentinel_ids": list(tokenizer.sentinel_ids),
    }  # fmt: skip
