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

from settings.errors import UserError

PICKLE_FILE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class PickleFile:
    """The tensors of one pickled file, by name, as `safetensors.safe_open` gives those of its own.

    Raises:
        UserError: the file is missing, broken, or holds something else than tensors.
    Memory: none where the file can be mapped, else the file.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except FileNotFoundError:
            raise UserError(
                "{path}, is named by {pickle_index} but is not there; copy the folder again",
                path=path,
                pickle_index=PICKLE_INDEX,
            ) from None
        except pickle.UnpicklingError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                "{path}, is broken or holds more than tensors and is not read: {reason}", path=path, reason=reason
            ) from None
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                "{path}, is cut off or broken ({reason}); copy or download it again", path=path, reason=reason
            ) from None
        if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
            raise UserError(
                "{path}, is not a table of tensors by name; give a folder that a model was saved in", path=path
            )
        self._tensors: dict[str, Tensor] = content

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> StoredTensor:
        return StoredTensor(self._tensors[name])


class StoredTensor:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._tensor[rows]
