"""The texts that `search` looks through, and their vectors: one Arrow file in `cache_dir`, mapped during a search.

It is made once for a model, its settings and the files of the texts, part by part as `embed` writes vectors, so that
work that was cut off goes on with the next part.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from commands.embed import EmbeddedText, VectorWork
from commands.text_rows import UnfinishedFile
from commands.vector_files import ID, VECTOR
from data.sources.embedding_columns import SECOND_TEXTS
from data.sources.lines import BadRows
from data.sources.prompts import Prompt, prompts_in_child
from data.sources.source import Source
from settings.declared import Config
from settings.errors import UserError
from support.units import MIB

BLOCK_BYTES = 8 * MIB  # Vectors that are compared with queries at a time.
BLOCK_COPIES = 5  # They are there as pieces, together, and of length 1, beside what products take.
TEXT_BYTES = 17  # A text by its key, by the number of the first one that is equal, and whether that is itself.
TEXT = "text"
KEY = "key"
Keys = NDArray[np.int64]


def key_of(text: str) -> int:
    """64 bits that texts share which differ in blanks around them alone."""
    return int.from_bytes(hashlib.blake2b(text.strip().encode(), digest_size=8).digest(), "little", signed=True)


class CorpusWork(VectorWork):
    """Vectors of the texts of a corpus, kept with the texts."""

    version = 2
    command = "search"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # Where the columns of pairs are named, documents may have others.
        if "," in self.config.data.text_column:
            usual = [replace(self.config.data, text_column=name, prompt_column=name) for name in (TEXT, *SECOND_TEXTS)]
            self.columns = [*self.columns, *usual]

    def read(self, sources: Sequence[Source], bad_rows: BadRows, max_bytes: int) -> Iterator[Prompt]:
        """See `TextWork`; each text of a list is one of the corpus."""
        return prompts_in_child(sources, self.columns, bad_rows, max_bytes, self.keeps, splits_lists=True)

    def write(self, part: list[EmbeddedText], path: Path) -> None:
        vectors = np.concatenate([row.vectors for row in part])
        # `pa.array` of numbers would import pandas where it is installed, which takes 30 MiB.
        values = pa.Array.from_buffers(pa.float32(), len(vectors), [None, pa.py_buffer(vectors)])
        keys = pa.array([key_of(row.text) for row in part], pa.int64())
        columns = {
            ID: pa.array([row.id for row in part], pa.string()),
            TEXT: pa.array([row.text for row in part], pa.string()),
            KEY: keys,
            VECTOR: pa.FixedSizeListArray.from_arrays(values, len(part[0].vectors)),
        }
        batch = pa.record_batch(columns)
        with pa.ipc.new_file(str(path), batch.schema) as file:
            file.write_batch(batch)

    def join(self, parts: Sequence[Path], rows: int, path: Path) -> None:
        if not rows:
            raise UserError("--corpus = {path}, holds no texts", path=self.config.search.corpus)
        with pa.OSFile(str(path), "wb") as whole:
            writer = None
            for part in parts:
                with pa.memory_map(str(part)) as source, pa.ipc.open_file(source) as file:
                    batch = file.get_batch(0)
                    writer = writer or pa.ipc.new_file(whole, batch.schema)
                    writer.write_batch(batch)
            assert writer is not None
            writer.close()

    def notes(self, output: UnfinishedFile | None, bad_rows: BadRows) -> list[str]:
        return super().notes(None, bad_rows)


class Corpus:
    """A file that `CorpusWork` has written.

    Args:
        path: of the file, which stays mapped.
    Memory: `TEXT_BYTES` for each text, and twice as much at the beginning.
    """

    def __init__(self, path: Path) -> None:
        self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [self._file.get_batch(number) for number in range(self._file.num_record_batches)]
        self._begins = np.cumsum([0, *(len(batch) for batch in batches)]).tolist()
        self.width = batches[0].schema.field(VECTOR).type.list_size
        keys = np.concatenate([np.from_dlpack(batch.column(KEY)) for batch in batches])
        # Equal texts are found once, as the first of them.
        self._keys, self._firsts = np.unique(keys, return_index=True)
        self._is_first = np.zeros(len(keys), np.bool_)
        self._is_first[self._firsts] = True

    def __len__(self) -> int:
        """How many texts there are."""
        return len(self._is_first)

    @property
    def distinct(self) -> int:
        """How many of them differ."""
        return len(self._keys)

    def blocks(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers (n,) of texts, ascending, and their vectors (n, V) of length 1, each text once.

        Memory: `BLOCK_BYTES`, `BLOCK_COPIES` times.
        """
        most = max(1, BLOCK_BYTES // (4 * self.width))
        numbers = list[NDArray[np.int64]]()
        vectors = list[NDArray[np.float32]]()
        for batch, begin in enumerate(self._begins[:-1]):
            own = np.flatnonzero(self._is_first[begin : self._begins[batch + 1]])
            numbers.append(begin + own)
            vectors.append(self._vectors(batch)[own])
            count = sum(map(len, numbers))
            is_last = batch == len(self._begins) - 2
            if count >= most or (is_last and count):
                block = torch.from_numpy(np.concatenate(vectors)).to(device)
                yield torch.from_numpy(np.concatenate(numbers)).to(device), F.normalize(block, dim=-1)
                numbers.clear()
                vectors.clear()

    def _vectors(self, batch: int) -> NDArray[np.float32]:
        values = self._file.get_batch(batch).column(VECTOR).flatten()
        return np.asarray(np.from_dlpack(values), np.float32).reshape(-1, self.width)

    def id_and_text(self, number: int) -> tuple[str, str]:
        """A text by its number, and its id."""
        batch = bisect_right(self._begins, number) - 1
        rows = self._file.get_batch(batch)
        place = number - self._begins[batch]
        return rows.column(ID)[place].as_py(), rows.column(TEXT)[place].as_py()

    def numbers_of(self, keys: Keys) -> NDArray[np.int64]:
        """The numbers of the texts with these keys, of those that are there."""
        places = np.searchsorted(self._keys, keys)
        places[places == len(self._keys)] = 0
        return self._firsts[places[self._keys[places] == keys]]


def held_bytes(texts: int) -> int:
    """What a corpus of so many texts takes while it is searched, its block included."""
    return 2 * TEXT_BYTES * texts + BLOCK_COPIES * BLOCK_BYTES
