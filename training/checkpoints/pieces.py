"""How are tensors stored in pieces, one file a process? Rows in safetensors files, and a table of them in JSON.

Nothing in it can run: torch.distributed.checkpoint keeps its table as a pickle, which is a program. Names are those that
are written here, and sizes are taken from the files, so a table cannot ask for more than there is.

    state/shards/rank_00000.safetensors, rank_00001.safetensors, ...
    state/shards/index.json    {"format": 1, "tensors": {KEY: [{"file": .., "first": number of the first row}, ..]}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from model.formats.tensor_files import write_safetensors
from storage import MOST_TABLE_BYTES, read_text

INDEX = "index.json"
_FILE = re.compile(r"rank_\d{5,9}\.safetensors")
Rows = Mapping[str, tuple[Tensor, int]]


def write_rows(folder: Path, rank: int, rows: Rows) -> dict[str, dict[str, Any]]:
    """Write the rows that one process holds.

    Args:
        rows: key -> rows, number of the first of them.
    Returns:
        key -> file and first row, for `write_index`.
    Raises:
        OSError: they cannot be written.
    Memory: none where tensors lie on the CPU, else one of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rank_{rank:05}.safetensors"
    write_safetensors({key: tensor.detach() for key, (tensor, _) in rows.items()}, folder / name)
    return {key: {"file": name, "first": first} for key, (_, first) in rows.items()}


def write_index(folder: Path, written: Iterable[Mapping[str, dict[str, Any]]]) -> None:
    """Write the table, from what `write_rows` gave on each process; raises OSError."""
    tensors: dict[str, list[dict[str, Any]]] = {}
    for pieces in written:
        for key, piece in pieces.items():
            tensors.setdefault(key, []).append(piece)
    (folder / INDEX).write_text(json.dumps({"format": 1, "tensors": tensors}) + "\n", encoding="utf8")


class Pieces:
    """Tensors that were written in pieces.

    Raises:
        ValueError: the table is broken, names files that are none of ours, or leaves rows out.
        OSError, SafetensorError: files are missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        content = json.loads(read_text(folder / INDEX, MOST_TABLE_BYTES))
        tensors = content.get("tensors") if isinstance(content, dict) else None
        if not isinstance(tensors, dict):
            raise ValueError(f"{folder / INDEX} holds no table of tensors")
        names = {piece["file"] for pieces in tensors.values() for piece in _checked(pieces, folder)}
        self._files = {name: safe_open(folder / name, framework="pt") for name in sorted(names)}
        self._pieces = {key: sorted(pieces, key=lambda piece: int(piece["first"])) for key, pieces in tensors.items()}

    def keys(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._pieces.keys()

    def read(self, key: str, device: torch.device, first: int = 0, count: int | None = None) -> Tensor:
        """`count` rows from `first` on; None: all. Memory: these rows, and those of one piece."""
        wanted, end = [], 0
        for piece in self._pieces[key]:
            stored = self._files[piece["file"]].get_slice(key)
            if piece["first"] != end:
                raise ValueError(f"rows {end} to {piece['first']} of {key} are missing")
            start, end = end, end + stored.get_shape()[0]
            low, high = max(first, start), end if count is None else min(first + count, end)
            if low < high:
                wanted.append((stored, low - start, high - start))
        rows = sum(high - low for _, low, high in wanted)
        if rows != (end if count is None else count):
            raise ValueError(f"{key} has {end} rows, and others are wanted")
        result, at = torch.empty(0), 0
        for stored, low, high in wanted:
            part = stored[low:high]
            if not at:
                result = torch.empty(rows, *part.shape[1:], dtype=part.dtype, device=device)
            result[at : at + len(part)] = part
            at += len(part)
        return result


def _checked(pieces: Any, folder: Path) -> list[dict[str, Any]]:
    well = isinstance(pieces, list) and pieces and all(_is_piece(piece) for piece in pieces)
    if not well:
        raise ValueError(f"{folder / INDEX} names pieces that this program does not write")
    return list(pieces)


def _is_piece(piece: Any) -> bool:
    if not isinstance(piece, dict) or type(piece.get("first")) is not int:
        return False
    return isinstance(piece.get("file"), str) and _FILE.fullmatch(piece["file"]) is not None
