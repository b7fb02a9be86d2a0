"""Tensors of a model folder and their shapes, read from the headers of its safetensors files; torch is not imported.

Before a run may take much memory it has to know the shape of the model it goes on from. `tensor_files` reads the numbers.

Source: the layout: github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from language import say
from limits import FILE_CHUNK_BYTES
from model.formats.checksums import is_inside
from settings.errors import UserError
from settings.program import program
from storage import read_text

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
INT8_FILE = "model.int8.safetensors"  # another name: transformers would take whole numbers for weights
# what torch.compile, DDP, FSDP and gradient checkpointing put into the names of the tensors of a model that they wrap, and
# transformers' models with a head over labels
WRAPPERS = re.compile(r"\b(?:_orig_mod|module|transformer|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
SCALE = ".scale"  # after the name of a tensor in int8: the name of its scales, one a row


class Kind(NamedTuple):
    """The files of one format: the index of shards, single files by choice, and the ending of all."""

    index_file: str
    names: tuple[str, ...]
    ending: str


SAFE = Kind(INDEX_FILE, (WEIGHTS_FILE, INT8_FILE), ".safetensors")


class TensorHeaders:
    """The tensors of a folder, in one file or in shards with an index: names, shapes, sizes.

    Args:
        folder: where they lie. kinds: of files that are read, the first that is there.
    Raises:
        UserError: no such file, one that is cut off or broken, or an index that names files elsewhere.
    Memory: the headers.
    """

    FRAMEWORK = "numpy"  # whose tensors a piece of a file would become

    def __init__(self, folder: str | Path, kinds: Sequence[Kind] = (SAFE,)) -> None:
        self.path, self._kinds = Path(folder), kinds
        self._files: dict[str, Path] = {}  # name of a tensor -> where it lies
        self._stored: dict[str, str] = {}  # name of a tensor -> what it is called there
        self.file_bytes = 0
        for path in map(self.path.joinpath, self._shards()):
            names = list(self._open(path).keys())
            self.file_bytes += path.stat().st_size
            for stored in names:
                name = WRAPPERS.sub("", stored)
                self._files[name], self._stored[name] = path, stored

    def _shards(self) -> list[str]:
        for kind in self._kinds:
            # as transformers looks: the index beside a file that holds all may be an older one's
            for name in kind.names:
                if (self.path / name).is_file():
                    return [name]
            if (self.path / kind.index_file).is_file():
                return self._indexed(kind)
        raise UserError(
            say("{path}, holds no {file}{hint}", path=self.path, file=WEIGHTS_FILE, hint=_pickled(self.path))
        )

    def _indexed(self, kind: Kind) -> list[str]:
        index = self.path / kind.index_file
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError("{index}, has no weight_map; copy or download it again", index=index)
        for name in places.values():
            if not is_inside(name) or "/" in name or not name.endswith(kind.ending):
                raise UserError(
                    "{index}, names {name!r} as a file of weights; allowed: {ending} files of its own folder; use a "
                    "folder from where it was published",
                    index=index,
                    name=name,
                    ending=kind.ending,
                )
        return sorted(set(places.values()))

    def _open(self, path: Path) -> Any:
        """A file of tensors, opened anew for each piece: the pages that a mapping has read are the process's until it ends."""
        try:
            if not path.is_file():  # a pipe would be waited for
                raise FileNotFoundError
            return safe_open(path, framework=self.FRAMEWORK)
        except FileNotFoundError:
            raise UserError(
                say("{path}, is named by {index} but is not there; copy the folder again", path=path, index=INDEX_FILE)
            ) from None
        except (SafetensorError, OSError) as error:
            raise UserError(
                say("{path}, is cut off or broken ({error}); copy or download it again", path=path, error=error)
            ) from None

    @property
    def names(self) -> set[str]:
        return {name for name in self._files if not name.endswith(SCALE)}

    def _slice(self, name: str) -> Any:
        return self._open(self._files[name]).get_slice(self._stored[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, read from the header."""
        return tuple(self._slice(name).get_shape())

    def matrix_dtype(self) -> str:
        """What the header calls the dtype of all matrices, such as F32; empty where they have several."""
        matrices = [name for name in self.names if len(self.shape(name)) == 2 and "relative_attention_bias" not in name]
        found = {str(self._slice(name).get_dtype()) for name in matrices}
        return found.pop() if len(found) == 1 else ""

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors are the same, bit by bit. Memory: two pieces of FILE_CHUNK_BYTES."""
        names = [(first, second)]
        if first + SCALE in self._files and second + SCALE in self._files:
            names.append((first + SCALE, second + SCALE))
        kinds = [[(self._slice(name).get_dtype(), self.shape(name)) for name in pair] for pair in names]
        if any(one != other for one, other in kinds):
            return False
        return all(a == b for pair in names for a, b in zip(*map(self._bytes, pair), strict=True))

    def _bytes(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor in pieces, by the header's own offsets: numpy, which safetensors would read by, has no bf16."""
        with self._files[name].open("rb", buffering=0) as file:
            length = int.from_bytes(file.read(8), "little")
            start, end = json.loads(file.read(length))[self._stored[name]]["data_offsets"]
            file.seek(8 + length + start)
            for begin in range(start, end, FILE_CHUNK_BYTES):
                yield file.read(min(FILE_CHUNK_BYTES, end - begin))


def _pickled(folder: Path) -> str:
    if any(folder.glob("pytorch_model*.bin*")):
        told = "; pytorch_model.bin is not read here, because a pickle can run code; where you trust it, convert it once: {program} convert --model={folder} --output=FOLDER --allow_pickle=True"
        return say(told, program=program(), folder=folder)
    if (folder / "adapter_config.json").exists():
        told = " but an adapter; a plain model is made of it by {program} merge --adapter={folder} --output=FOLDER"
        return say(told, program=program(), folder=folder)
    return say("; give the folder of a saved model")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; UserError where there is none."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        raise UserError(
            say("{parent}, holds no {name}; give the folder of a saved model", parent=path.parent, name=path.name)
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(say("{path}, cannot be read: {error}", path=path, error=error)) from None
    if not isinstance(content, dict):
        raise UserError(say("{path}, is not a JSON object; copy or download it again", path=path))
    return content
