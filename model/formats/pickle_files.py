"""Old checkpoints, whose tensors are pickled.

Only by torch's weights-only loader, which builds tensors and refuses every other object, and only where the user said
`--allow_pickle=True`: a pickle is a program. The file is mapped, so that no more of it is in memory than is being
copied; files of before torch 1.6 cannot be mapped and are read as a whole.

Source: torch.load, weights_only and mmap.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from model.formats.headers import INDEX_ENDING
from settings.errors import UserError

PICKLE_FILE = "pytorch_model.bin"
PICKLE_INDEX = PICKLE_FILE + INDEX_ENDING
# The names that safetensors has for the dtypes of weights and of states.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class PickleFile:
    """The tensors of one pickled file, by name, as `safetensors.safe_open` gives those of its own.

    Raises:
        UserError: the file is broken, or holds something else than tensors.
    Memory: none where the file can be mapped, else the file.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            raise UserError(
                "{path}, is broken or holds more than tensors and is not read: {reason}", path=path, reason=_line(error)
            ) from None
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise UserError(
                "{path}, is cut off or broken ({reason}); copy or download it again", path=path, reason=_line(error)
            ) from None
        if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
            raise UserError(
                "{path}, is not a table of tensors by name; give a folder that a model was saved in", path=path
            )
        self._tensors: dict[str, Tensor] = content

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> PickledTensor:
        return PickledTensor(self._tensors[name])


class PickledTensor:
    """One tensor, as the slices of safetensors show theirs."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return DTYPE_NAMES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, rows: slice) -> Tensor:
        return self._tensor[rows]


def _line(error: BaseException) -> str:
    """The beginning of what an error says, or what it is called."""
    return " ".join(str(error).split())[:200] or type(error).__name__
