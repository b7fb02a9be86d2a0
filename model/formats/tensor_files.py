"""Tensors in safetensors files: read in chunks of rows, written one by one, in one file or in shards.

What their headers say is read by `headers`, without torch.
Pickled files (`pytorch_model.bin`) are read only where the user allows it: see `pickle_files`.

Source: the layout: github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limits import FILE_CHUNK_BYTES
from model.formats.headers import SAFE, SCALE, Kind, TensorHeaders
from model.formats.pickle_files import PICKLE_FILE, PICKLE_INDEX, PickleFile

PICKLED = Kind(PICKLE_INDEX, (PICKLE_FILE,), ".bin")
Here = Callable[[str], AbstractContextManager[Tensor | Iterable[Tensor]]]
_DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int8: "I8", torch.uint8: "U8", torch.int64: "I64",
}  # fmt: skip


class TensorFolder(TensorHeaders):
    """The tensors of a folder, in one file or in shards with an index, by name.

    Args:
        folder: where they lie.
        allow_pickle: whether pickled files are read, where there are no others.
    Raises:
        UserError: no such file, one that is cut off or broken, or an index that names files elsewhere.
    Memory: none; reading takes a chunk at a time. Pickled files of before torch 1.6: a whole file.
    """

    FRAMEWORK = "pt"

    def __init__(self, folder: str | Path, allow_pickle: bool = False) -> None:
        self._replaced: dict[str, tuple[int, Tensor]] = {}
        self._mapped: dict[Path, Any] = {}
        self._pickled: dict[Path, PickleFile] = {}
        super().__init__(folder, (SAFE, PICKLED) if allow_pickle else (SAFE,))

    def _open(self, path: Path) -> Any:
        if path.suffix != PICKLED.ending:
            return super()._open(path)
        if path not in self._pickled:
            self._pickled[path] = PickleFile(path)
        return self._pickled[path]

    def replace_rows(self, name: str, first: int, rows: Tensor) -> None:
        """Let a table be read with other rows from `first` on, and more of them than there are. Memory: these rows."""
        self._replaced[name] = first, rows

    def shape(self, name: str) -> tuple[int, ...]:
        count, *rest = super().shape(name)
        if name in self._replaced:
            first, rows = self._replaced[name]
            count = max(count, first + len(rows))
        return count, *rest

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor in pieces of whole rows, none much larger than FILE_CHUNK_BYTES, from the first row to the last.

        What is stored in int8 comes as fp32.
        """
        if name not in self._replaced:
            yield from self._stored_chunks(name)
            return
        start, (first, rows) = 0, self._replaced[name]
        for chunk in self._stored_chunks(name):
            low, high = max(start, first), min(start + len(chunk), first + len(rows))
            if low < high:
                chunk = chunk.clone()
                chunk[low - start : high - start] = rows[low - first : high - first]
            start += len(chunk)
            yield chunk
        if start < first + len(rows):
            yield rows[start - first :]

    def _stored_chunks(self, name: str) -> Iterator[Tensor]:
        count, *rest = super().shape(name)
        rows = max(1, FILE_CHUNK_BYTES // (4 * math.prod(rest)))
        for start in range(0, count, rows):
            part = self._slice(name)[start : start + rows]
            if part.dtype == torch.int8:
                scales = self._slice(name + SCALE)[start : start + rows]
                part = part.float().mul_(scales.unsqueeze(1))
            yield part

    def is_number(self, name: str) -> bool:
        """Whether a tensor holds what a weight can be: floating-point numbers, or int8 with its scales."""
        try:
            dtype = self.dtype(name)
        except RuntimeError:  # several numbers in a byte, as torch tells it
            return False
        return dtype.is_floating_point or dtype == torch.int8

    def lacks_scale(self, name: str) -> bool:
        """Whether a tensor is stored in int8 without a scale for each of its rows."""
        if self.dtype(name) != torch.int8:
            return False
        return name + SCALE not in self._files or self.shape(name + SCALE) != self.shape(name)[:1]

    def copy_into(self, name: str, target: Tensor) -> None:
        """Fill `target`, of the same shape and any dtype and device. Memory: one chunk."""
        start = 0
        for chunk in self.chunks(name):
            target[start : start + len(chunk)].copy_(chunk)
            start += len(chunk)

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A whole tensor whose memory are the pages of its file, which the system may drop and read again; what is written to it
        stays with the process. None where it is not stored as `dtype`, or not in safetensors."""
        path = self._files[name]
        if name in self._replaced or path.suffix == PICKLED.ending or self.dtype(name) != dtype:
            return None
        if path not in self._mapped:  # one mapping a file: each takes its size of addresses
            self._mapped[path] = self._open(path)
        found: Tensor = self._mapped[path].get_tensor(self._stored[name])
        return found

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors are the same; pickled ones number by number. Memory: two chunks."""
        if not any(self._files[name].suffix == PICKLED.ending for name in (first, second)):
            return super().equal(first, second)
        if self.shape(first) != self.shape(second):
            return False
        return all(torch.equal(a, b) for a, b in zip(self.chunks(first), self.chunks(second), strict=True))

    def dtype(self, name: str) -> torch.dtype:
        """What the numbers of one tensor are stored as."""
        return self._slice(name)[:0].dtype


def write_safetensors(
    tensors: Mapping[str, Tensor], path: str | Path, here: Here | None = None, about: Mapping[str, str] | None = None
) -> None:
    """Write tensors one by one: 8 bytes of header length, the header in JSON, the bytes of all tensors end to end.

    Args:
        here: name -> a context in which that tensor has its content, whole or in pieces, where some show their shape and dtype alone.
        about: words for the file's own metadata.
    Raises:
        OSError: the file cannot be written.
    Memory: one tensor where they are not contiguous on the CPU, else nothing.
    """
    here = here or (lambda name: nullcontext(tensors[name]))
    # widest numbers first, so that every tensor begins at a multiple of its width
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(about or {})}}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            with here(name) as content:
                for tensor in (content,) if isinstance(content, Tensor) else content:
                    file.write(tensor.to("cpu").contiguous().view(torch.uint8).numpy().data)
