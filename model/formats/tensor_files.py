"""How are tensors stored in files? As safetensors: read in chunks of rows, written one by one, in one file or in shards.

Pickled files (`pytorch_model.bin`) are read only where the user allows it: see `pickle_files`.

Source: the layout: github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from limits import FILE_CHUNK_BYTES
from model.formats.checksums import is_inside
from model.formats.pickle_files import PICKLE_FILE, PICKLE_INDEX, PickleFile
from settings.fields import UserError

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
INT8_FILE = "model.int8.safetensors"  # another name: transformers would take whole numbers for weights
SCALE = ".scale"  # after the name of a tensor in int8: the name of its scales, one a row
Here = Callable[[str], AbstractContextManager[Tensor]]
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}


class TensorFolder:
    """The tensors of a folder, in one file or in shards with an index, by name.

    Args:
        folder: where they lie.
        allow_pickle: whether pickled files are read, where there are no others.
    Raises:
        UserError: no such file, one that is cut off or broken, or an index that names files elsewhere.
    Memory: none; reading takes a chunk at a time. Pickled files of before torch 1.6: a whole file.
    """

    def __init__(self, folder: str | Path, allow_pickle: bool = False) -> None:
        self.path = Path(folder)
        self._allow_pickle = allow_pickle
        # a safetensors file is opened anew for each piece: the pages that a mapping has read are the process's until it ends
        self._opening: dict[str, Callable[[], Any]] = {}
        self.file_bytes = 0
        for name in self._shards(allow_pickle):
            opened = self._open(self.path / name)
            self.file_bytes += (self.path / name).stat().st_size
            is_pickled = isinstance(opened, PickleFile)
            again = partial(_same, opened) if is_pickled else partial(self._open, self.path / name)
            self._opening.update(dict.fromkeys(opened.keys(), again))

    def _shards(self, allow_pickle: bool) -> list[str]:
        for index, names in ((INDEX_FILE, (WEIGHTS_FILE, INT8_FILE)), (PICKLE_INDEX, (PICKLE_FILE,))):
            if index == PICKLE_INDEX and not allow_pickle:
                break
            if (self.path / index).exists():
                return self._indexed(index)
            for name in names:
                if (self.path / name).exists():
                    return [name]
        raise UserError(f"{self.path}, holds no {WEIGHTS_FILE}{_pickled(self.path)}")

    def _indexed(self, index: str) -> list[str]:
        places = read_json(self.path / index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError(f"{self.path / index}, has no weight_map; copy or download it again")
        kind = ".bin" if index == PICKLE_INDEX else ".safetensors"
        for name in places.values():
            if not is_inside(name) or "/" in name or not name.endswith(kind):
                raise UserError(
                    f"{self.path / index}, names {name!r} as a file of weights; allowed: {kind} files of its own folder; "
                    "use a folder from where it was published"
                )
        return sorted(set(places.values()))

    def _open(self, path: Path) -> Any:
        if self._allow_pickle and path.suffix == ".bin":
            return PickleFile(path)
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise UserError(f"{path}, is named by {INDEX_FILE} but is not there; copy the folder again") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}, is cut off or broken ({error}); copy or download it again") from None

    @property
    def names(self) -> set[str]:
        return {name for name in self._opening if not name.endswith(SCALE)}

    def _slice(self, name: str) -> Any:
        return self._opening[name]().get_slice(name)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor in pieces of whole rows, none much larger than FILE_CHUNK_BYTES, from the first row to the last.

        What is stored in int8 comes as fp32.
        """
        count, *rest = self.shape(name)
        rows = max(1, FILE_CHUNK_BYTES // (4 * math.prod(rest)))
        for start in range(0, count, rows):
            part = self._slice(name)[start : start + rows]
            if part.dtype == torch.int8:
                scales = self._slice(name + SCALE)[start : start + rows]
                part = part.float().mul_(scales.unsqueeze(1))
            yield part

    def lacks_scale(self, name: str) -> bool:
        """Whether a tensor is stored in int8 without a scale for each of its rows."""
        if self.dtype(name) != torch.int8:
            return False
        return name + SCALE not in self._opening or self.shape(name + SCALE) != self.shape(name)[:1]

    def copy_into(self, name: str, target: Tensor, first_row: int = 0) -> None:
        """Fill `target`, of any dtype and device, with as many rows as it has, from `first_row` on. Memory: one chunk."""
        start, end = -first_row, len(target)
        for chunk in self.chunks(name):
            low, high = max(start, 0), min(start + len(chunk), end)
            if low < high:
                target[low:high].copy_(chunk[low - start : high - start])
            start += len(chunk)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors are the same, number by number. Memory: two chunks."""
        if self.shape(first) != self.shape(second):
            return False
        return all(torch.equal(a, b) for a, b in zip(self.chunks(first), self.chunks(second), strict=True))

    def dtype(self, name: str) -> torch.dtype:
        """What the numbers of one tensor are stored as."""
        return self._slice(name)[:0].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, read from the header."""
        return tuple(self._slice(name).get_shape())


def _same(opened: PickleFile) -> PickleFile:
    return opened


def _pickled(folder: Path) -> str:
    if any(folder.glob("pytorch_model*.bin*")):
        return (
            "; pytorch_model.bin is not read here, because a pickle can run code; where you trust it, convert it once: "
            f"python train_low_mem.py convert --model={folder} --output=FOLDER --allow_pickle=True"
        )
    if (folder / "adapter_config.json").exists():
        return (
            " but an adapter; a plain model is made of it by "
            f"python train_low_mem.py merge --adapter={folder} --output=FOLDER"
        )
    return "; name the folder of a saved model"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; UserError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent}, holds no {path.name}; name the folder of a saved model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}, cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}, is not a JSON object; copy or download it again")
    return content


def write_safetensors(tensors: Mapping[str, Tensor], path: str | Path, here: Here | None = None) -> None:
    """Write tensors one by one: 8 bytes of header length, the header in JSON, the bytes of all tensors end to end.

    Args:
        here: name -> a context in which that tensor has its content, where some show their shape and dtype alone.
    Raises:
        OSError: the file cannot be written.
    Memory: one tensor where they are not contiguous on the CPU, else nothing.
    """
    here = here or (lambda name: nullcontext(tensors[name]))
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
            with here(name) as tensor:
                file.write(tensor.to("cpu").contiguous().view(torch.uint8).numpy().data)


def write_shards(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int, here: Here | None = None) -> None:
    """Write tensors into files of about `shard_bytes` at most, with an index, in their order; few into one file.

    Args:
        here: as of `write_safetensors`.
    Raises:
        OSError: a file cannot be written.
    Memory: as `write_safetensors`.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        write_safetensors(tensors, folder / WEIGHTS_FILE, here)
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(shard, folder / file, here)
        places.update(dict.fromkeys(shard, file))
    content = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")
