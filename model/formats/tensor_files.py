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

from devices.sizes import FILE_CHUNK_BYTES
from model.formats.headers import SCALE, TensorHeaders
from model.formats.pickle_files import DTYPE_NAMES, PICKLE_FILE, PICKLE_INDEX, PickleFile

Pieces = Callable[[str], AbstractContextManager[Iterable[Tensor]]]


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
        if allow_pickle:
            self.FILES = (*self.FILES, PICKLE_FILE, PICKLE_INDEX)
        super().__init__(folder)

    def _open(self, path: Path) -> Any:
        if not _is_pickle(path):
            return super()._open(path)
        if path not in self._pickled:
            self._pickled[path] = PickleFile(path)
        return self._pickled[path]

    def replace_rows(self, name: str, first: int, rows: Tensor) -> None:
        """Let a table be read with other rows from `first` on, and more of them than there are. Memory: these rows."""
        self._replaced[name] = first, rows

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor in pieces of whole rows, none much larger than FILE_CHUNK_BYTES, from the first row to the last.

        What is stored in int8 comes as fp32.
        """
        count = self.shape(name)[0]
        if name not in self._replaced:
            yield from self._stored_rows(name, 0, count)
        else:
            first, rows = self._replaced[name]
            yield from self._stored_rows(name, 0, first)
            yield rows
            yield from self._stored_rows(name, first + len(rows), count)

    def _stored_rows(self, name: str, first: int, end: int) -> Iterator[Tensor]:
        step = max(1, FILE_CHUNK_BYTES // (4 * math.prod(self.shape(name)[1:])))
        for start in range(first, end, step):
            rows = slice(start, min(end, start + step))
            part = self._slice(name)[rows]
            if part.dtype == torch.int8:
                part = part.float().mul_(self._slice(name + SCALE)[rows].unsqueeze(1))
            yield part

    def _slice(self, name: str) -> Any:
        tensor = self._tensors[name]
        return self._open(tensor.file).get_slice(tensor.name)

    def _bytes(self, name: str) -> Iterator[bytes]:
        if not _is_pickle(self._tensors[name].file):
            return super()._bytes(name)
        return (
            part.contiguous().view(torch.uint8).numpy().tobytes()
            for part in self._stored_rows(name, 0, self.shape(name)[0])
        )

    def copy_into(self, name: str, target: Tensor) -> None:
        """Fill `target`, of the same shape and any dtype and device. Memory: one chunk."""
        start = 0
        for chunk in self.chunks(name):
            target[start : start + len(chunk)].copy_(chunk)
            start += len(chunk)

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A whole tensor whose memory are the pages of its file, which the system may drop and read again; what is
        written to it stays with the process. None where it is not stored as `dtype`, or not in safetensors.
        """
        tensor = self._tensors[name]
        if name in self._replaced or _is_pickle(tensor.file) or tensor.dtype != DTYPE_NAMES[dtype]:
            return None
        if tensor.file not in self._mapped:  # There is one mapping a file, as each takes its size of addresses.
            self._mapped[tensor.file] = self._open(tensor.file)
        pages: Tensor = self._mapped[tensor.file].get_tensor(tensor.name)
        return pages


def _is_pickle(path: Path) -> bool:
    return path.suffix == Path(PICKLE_FILE).suffix


def write_safetensors(
    tensors: Mapping[str, Tensor],
    path: str | Path,
    pieces: Pieces | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write tensors one by one: 8 bytes of header length, the header in JSON, the bytes of all tensors end to end.

    Args:
        pieces: name -> a context in which that tensor has its content, in pieces of whole rows, where some tensors show
            their shape and dtype alone.
        about: words for the file's own metadata.
    Raises:
        OSError: the file cannot be written.
    Memory: one piece where it is not contiguous on the CPU, else nothing.
    """
    pieces = pieces or (lambda name: nullcontext([tensors[name]]))
    # The widest numbers come first, so that every tensor begins at a multiple of its width.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(about or {})}}
    end = 0
    for name in names:
        start = end
        end += tensors[name].nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            with pieces(name) as content:
                for tensor in content:
                    file.write(tensor.to("cpu").contiguous().view(torch.uint8).numpy().data)
