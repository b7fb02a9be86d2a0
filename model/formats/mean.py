"""The mean of several folders of weights, formed in fp32, stored in the dtype they had.

Weights that were learnt at a high, constant rate lie around a better place than any of them is at; their mean is near it, as
weights would be whose rate had been lowered, and it generalises better.
Source: Izmailov et al. 2018, Averaging Weights Leads to Wider Optima (arXiv 1803.05407); of the last checkpoints, Vaswani et
al. 2017 (arXiv 1706.03762), section 6.1.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from language import say
from limits import FILE_CHUNK_BYTES
from model.formats.checksums import CHECKSUMS_FILE
from model.formats.tensor_files import write_safetensors

SUFFIX = ".safetensors"


def write_mean(folders: Sequence[Path], made: Path) -> None:
    """Fill an empty folder with the mean of models or adapters, and all their other files as the last one has them.

    Args:
        folders: of one shape and layout, each with the same files of weights; folders inside them stay behind.
    Raises:
        ValueError: they are of different shapes. OSError: a folder cannot be read or written.
    Memory: two tensors, and two chunks of one in fp32.
    """
    for path in sorted(folders[-1].iterdir()):
        if path.suffix == SUFFIX:
            _write_mean([folder / path.name for folder in folders], made / path.name)
        elif path.is_file() and path.name != CHECKSUMS_FILE:
            shutil.copyfile(path, made / path.name)


def _write_mean(files: Sequence[Path], made: Path) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(str(file), "pt")) for file in files]
        shapes = [{name: _empty(each.get_slice(name)) for name in each.keys()} for each in opened]  # noqa: SIM118
        told = [{name: (each.shape, each.dtype) for name, each in tensors.items()} for tensors in shapes]
        if different := next((file for file, found in zip(files, told, strict=True) if found != told[-1]), None):
            raise ValueError(say("{different}, holds other tensors than {files}", different=different, files=files[-1]))

        @contextmanager
        def here(name: str) -> Iterator[Tensor]:
            yield _mean([each.get_slice(name) for each in opened], shapes[-1][name])

        about = {key: value for key, value in (opened[-1].metadata() or {}).items() if key != "format"}
        write_safetensors(shapes[-1], made, here, about)


def _empty(part: Any) -> Tensor:
    return torch.empty(part.get_shape(), dtype=part[:0].dtype, device="meta")


def _mean(parts: Sequence[Any], like: Tensor) -> Tensor:
    mean = torch.empty(like.shape, dtype=like.dtype)
    rows = max(1, FILE_CHUNK_BYTES // (4 * max(1, like[:1].numel())))
    for first in range(0, len(like), rows):
        total = parts[0][first : first + rows].to(torch.float32, copy=True)  # never written into the mapped file
        for part in parts[1:]:
            total += part[first : first + rows].float()
        mean[first : first + rows] = total.div_(len(parts))
    return mean
