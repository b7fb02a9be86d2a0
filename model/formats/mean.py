"""The mean of several folders of weights, formed in fp32, stored in the dtype they had.

Weights that were learnt at a high, constant rate lie around a better place than any of them is at; their mean is near
it, as weights would be whose rate had been lowered, and it generalises better.
Source: Izmailov et al. 2018, Averaging Weights Leads to Wider Optima (arXiv 1803.05407); of the last checkpoints,
Vaswani et al. 2017 (arXiv 1706.03762), section 6.1.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from devices.sizes import FILE_CHUNK_BYTES
from model.formats.checksums import published_files
from model.formats.pickle_files import DTYPES
from model.formats.tensor_files import write_safetensors
from support.language import say

SUFFIX = ".safetensors"


def write_mean(folders: Sequence[Path], target: Path) -> None:
    """Fill an empty folder with the mean of models or adapters, and all their other files as the last one has them.

    Args:
        folders: of one shape and layout, each with the same files of weights; what only resuming needs stays behind.
    Raises:
        ValueError: they are of different shapes. OSError: a folder cannot be read or written.
    Memory: two chunks of one tensor in fp32.
    """
    for path in published_files(folders[-1]):
        name = path.relative_to(folders[-1])
        (target / name).parent.mkdir(exist_ok=True)
        if path.suffix == SUFFIX:
            _write_mean([folder / name for folder in folders], target / name)
        else:
            shutil.copyfile(path, target / name)


def _write_mean(files: Sequence[Path], target: Path) -> None:
    opened = [safe_open(file, "pt") for file in files]
    headers = [_header(each) for each in opened]
    for file, header in zip(files, headers, strict=True):
        if header != headers[-1]:
            raise ValueError(say("{different}, holds other tensors than {files}", different=file, files=files[-1]))
    tensors = {
        name: torch.empty(shape, dtype=DTYPES[dtype], device="meta") for name, (shape, dtype) in headers[-1].items()
    }

    def pieces(name: str) -> AbstractContextManager[Iterator[Tensor]]:
        return nullcontext(_means([each.get_slice(name) for each in opened], tensors[name]))

    write_safetensors(tensors, target, pieces, opened[-1].metadata())


def _header(opened: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> shape and dtype of each tensor of a file."""
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def _means(parts: Sequence[Any], like: Tensor) -> Iterator[Tensor]:
    """The mean of one tensor of several files, in pieces of whole rows."""
    rows = max(1, FILE_CHUNK_BYTES // (4 * math.prod(like.shape[1:])))
    for first in range(0, len(like), rows):
        # A copy, because nothing may be written into the mapped file.
        total = parts[0][first : first + rows].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part[first : first + rows].float()
        yield total.div_(len(parts)).to(like.dtype)
