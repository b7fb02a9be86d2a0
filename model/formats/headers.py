"""Tensors of a model folder, read from the headers of its safetensors files; torch is not imported.

Before a run may take much memory it has to know the shape of the model it goes on from. `tensor_files` reads the
numbers.

Source: the layout: github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from devices.sizes import FILE_CHUNK_BYTES
from model.formats.heads import LABEL_HEADS
from model.formats.sentence_transformers import MATRIX, STORED_MATRIX, dense_folder
from settings.errors import UserError
from settings.program import program
from support.language import say
from support.storage import read_text

INDEX_ENDING = ".index.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = WEIGHTS_FILE + INDEX_ENDING
INT8_FILE = "model.int8.safetensors"  # It has another name because transformers would take whole numbers for weights.
# What torch.compile, DDP, FSDP and gradient checkpointing put into the names of the tensors of a model that they wrap,
# and transformers' models with a head over labels.
WRAPPERS = re.compile(r"\b(?:_orig_mod|module|transformer|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Bias tables and heads over labels are in fp32 wherever they are.
_IN_FP32 = re.compile("|".join((r"relative_attention_bias\.weight$", *map("^{}".format, LABEL_HEADS))))
SCALE = ".scale"  # The scales of a tensor in int8, one a row, have its name and this behind it.
INT8 = "I8"
# What a weight can be stored as, in the words of safetensors; int8 has scales beside it.
NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", INT8)


class StoredTensor(NamedTuple):
    """One tensor of a folder: its file, its name there, and what the header says of it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class TensorHeaders:
    """The tensors of a folder, in one file or in shards with an index: names, shapes, dtypes, sizes. The matrix of the
    vectors, in a folder of sentence-transformers, is one of them.

    Raises:
        UserError: no such file, one that is cut off or broken, or an index that names files elsewhere.
    Memory: what the headers say.
    """

    FRAMEWORK = "numpy"  # A piece of a file would become one of its tensors.
    # The first that is there is read, as transformers does: the index beside a file that holds all may be an older
    # one's.
    FILES: tuple[str, ...] = (WEIGHTS_FILE, INT8_FILE, INDEX_FILE)

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self._tensors: dict[str, StoredTensor] = {}
        self.file_bytes = 0
        for path in self._files(self.path):
            self._add(path, {})
        dense = dense_folder(self.path)
        if dense is not None:
            for path in self._files(dense):
                self._add(path, {STORED_MATRIX: MATRIX})
        self.names = {name for name in self._tensors if not name.endswith(SCALE)}

    def _add(self, path: Path, renamed: Mapping[str, str]) -> None:
        """Take the tensors of a file, some by other names."""
        opened = self._open(path)
        self.file_bytes += path.stat().st_size
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            tensor = StoredTensor(path, name, tuple(part.get_shape()), part.get_dtype())
            self._tensors[renamed.get(name, WRAPPERS.sub("", name))] = tensor

    def _files(self, folder: Path) -> list[Path]:
        name = next((name for name in self.FILES if (folder / name).is_file()), None)
        if name is None:
            hint = _what_is_there(folder, self.path)
            raise UserError("{path}, holds no {file}{hint}", path=folder, file=WEIGHTS_FILE, hint=hint)
        return self._shards(folder / name) if name.endswith(INDEX_ENDING) else [folder / name]

    def _shards(self, index: Path) -> list[Path]:
        """The files that an index names."""
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError("{index}, has no weight_map; copy or download it again", index=index)
        ending = Path(index.name.removesuffix(INDEX_ENDING)).suffix
        names = sorted(set(map(str, weight_map.values())))
        for name in names:
            if not re.fullmatch(rf"[^/\\:\0]+{re.escape(ending)}", name):
                raise UserError(
                    "{index}, names {name!r} as a file of weights; allowed: {ending} files of its own folder; use a "
                    "folder from where it was published",
                    index=index,
                    name=name,
                    ending=ending,
                )
            if not (index.parent / name).is_file():  # Opening a pipe would wait for it.
                raise UserError(
                    "{path}, is named by {index} but is not there; copy the folder again",
                    path=index.parent / name,
                    index=index.name,
                )
        return [index.parent / name for name in names]

    def _open(self, path: Path) -> Any:
        """A file of tensors, opened anew for each piece: the pages that a mapping has read are the process's until it
        ends.
        """
        try:
            return safe_open(path, framework=self.FRAMEWORK)
        except (SafetensorError, OSError) as error:
            raise UserError(
                "{path}, is cut off or broken ({error}); copy or download it again", path=path, error=error
            ) from None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._tensors[name].shape

    def is_number(self, name: str) -> bool:
        """Whether a tensor holds what a weight can be: floating-point numbers, or int8."""
        return self._tensors[name].dtype in NUMBERS

    def lacks_scale(self, name: str) -> bool:
        """Whether a tensor is stored in int8 without a scale for each of its rows."""
        tensor = self._tensors[name]
        scale = self._tensors.get(name + SCALE)
        return tensor.dtype == INT8 and (scale is None or scale.shape != tensor.shape[:1])

    def matrix_dtype(self) -> str:
        """What the header calls the dtype of all matrices, such as F32; empty where they have several."""
        dtypes = {
            self._tensors[name].dtype for name in self.names if len(self.shape(name)) == 2 and not _IN_FP32.search(name)
        }
        return dtypes.pop() if len(dtypes) == 1 else ""

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors are the same, bit by bit. Memory: two pieces of FILE_CHUNK_BYTES."""
        scales = (first + SCALE, second + SCALE)
        is_quantized = self._tensors.keys() >= set(scales)
        return self._same_bits(first, second) and (not is_quantized or self._same_bits(*scales))

    def _same_bits(self, first: str, second: str) -> bool:
        if self._tensors[first][2:] != self._tensors[second][2:]:  # Another shape or dtype.
            return False
        return all(map(bytes.__eq__, self._bytes(first), self._bytes(second)))

    def _bytes(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor in pieces, by the header's own offsets: numpy, which safetensors would read by, has no
        bf16.
        """
        tensor = self._tensors[name]
        with tensor.file.open("rb", buffering=0) as file:
            length = int.from_bytes(file.read(8), "little")
            start, end = json.loads(file.read(length))[tensor.name]["data_offsets"]
            file.seek(8 + length + start)
            for begin in range(start, end, FILE_CHUNK_BYTES):
                yield file.read(min(FILE_CHUNK_BYTES, end - begin))


def _what_is_there(folder: Path, model: Path) -> str:
    """The end of the message that a folder of a model holds no weights: what it holds instead, and what to do with
    it.
    """
    if any(folder.glob("pytorch_model*.bin*")):
        return say(
            "; pytorch_model.bin is not read here, because a pickle can run code; where you trust it, convert it once: "
            "{program} convert --model={folder} --output=FOLDER --allow_pickle=True",
            program=program(),
            folder=model,
        )
    if (folder / "adapter_config.json").exists():
        return say(
            " but an adapter; a plain model is made of it by {program} merge --adapter={folder} --output=FOLDER",
            program=program(),
            folder=folder,
        )
    return say("; give the folder of a saved model")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; UserError where there is none."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        raise UserError(
            "{parent}, holds no {name}; give the folder of a saved model", parent=path.parent, name=path.name
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("{path}, cannot be read: {error}", path=path, error=error) from None
    if not isinstance(content, dict):
        raise UserError("{path}, is not a JSON object; copy or download it again", path=path)
    return content
