"""How do tensors lie in files? As safetensors: read in chunks of rows, written one by one.

Source: the layout: github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from settings import UserError

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
CHUNK_BYTES = 4 * 2**20
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorFolder:
    """The tensors of a folder, in one file or in shards with an index, by name.

    Raises:
        UserError: no such file, or one that is cut off or broken.
    Memory: none; reading takes a chunk at a time.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path, self._files = Path(folder), {}  # type: ignore[var-annotated]
        for name in self._shards():
            opened = self._open(self.path / name)
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def _shards(self) -> list[str]:
        if (self.path / INDEX_FILE).exists():
            places = read_json(self.path / INDEX_FILE).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise UserError(f"{self.path / INDEX_FILE}, has no weight_map; copy or download it again")
            return sorted(set(places.values()))
        if (self.path / WEIGHTS_FILE).exists():
            return [WEIGHTS_FILE]
        raise UserError(f"{self.path}, holds no {WEIGHTS_FILE}{_pickled(self.path)}")

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise UserError(f"{path}, is named by {INDEX_FILE} but is not there; copy the folder again") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}, is cut off or broken ({error}); copy or download it again") from None

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor in pieces of whole rows, none much larger than CHUNK_BYTES, from the first row to the last."""
        stored = self._files[name].get_slice(name)
        count, *rest = stored.get_shape()
        rows = max(1, CHUNK_BYTES // (4 * math.prod(rest)))
        for start in range(0, count, rows):
            yield stored[start : start + rows]

    def copy_into(self, name: str, target: Tensor) -> None:
        """Fill `target`, of the same shape and any dtype and device. Memory: one chunk."""
        start = 0
        for chunk in self.chunks(name):
            target[start : start + len(chunk)].copy_(chunk)
            start += len(chunk)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors are the same, number by number. Memory: two chunks."""
        if self.shape(first) != self.shape(second):
            return False
        return all(torch.equal(a, b) for a, b in zip(self.chunks(first), self.chunks(second), strict=True))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, read from the header."""
        return tuple(self._files[name].get_slice(name).get_shape())


def _pickled(folder: Path) -> str:
    if any(folder.glob("pytorch_model*.bin*")):
        return "; pytorch_model.bin is not read (it can run code): convert it with transformers' save_pretrained"
    return "; name the folder of a saved model"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; UserError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent}, holds no {path.name}; name the folder of a saved model") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}, cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}, is not a JSON object; copy or download it again")
    return content


def write_safetensors(tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Write tensors one by one: 8 bytes of header length, the header in JSON, the bytes of all tensors end to end.

    Raises:
        OSError: the file cannot be written.
    Memory: one tensor where they are not contiguous on the CPU, else nothing.
    """
    # widest numbers first, so that every tensor begins at a multiple of its width
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
            file.write(tensors[name].to("cpu").contiguous().view(torch.uint8).numpy().data)
