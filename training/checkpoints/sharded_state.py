"""The checkpoint of a run whose processes each hold their rows of the weights, and of the optimizer's state.

It has the same files as any other: process 0 writes them and asks the others for one matrix at a time, so that nobody ever
holds more. It is read again by any number of processes, sharded or not, see `load_optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from config import GenerateConfig
from data.tokenizers.tokenizer import Tokenizer
from engine.optimizers import Optimizer
from engine.sharing.sharding import Part, Shards
from model import hf_format
from model.formats.checksums import STATE
from model.formats.headers import WEIGHTS_FILE
from model.formats.tensor_files import write_safetensors
from model.shapes import hf_names
from model.t5 import T5
from training.checkpoints.folder import Checkpoints
from training.checkpoints.state import GREEDY, OPTIMIZER_FILE, TrainingState, state_part, write_companions

Rows = Mapping[
    str, tuple[Tensor, Part | None]
]  # name -> rows held here, and which of the whole they are; None: the whole
DONE = -1


def save_sharded(
    checkpoints: Checkpoints, model: T5, tokenizer: Tokenizer, optimizer: Optimizer, state: TrainingState, shards: Shards,
    is_best: bool = False, answers: GenerateConfig = GREEDY,
) -> None:  # fmt: skip
    """Write a checkpoint; every process calls this at the same time. Memory: the largest matrix, of weights or state.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    names = hf_names(model.config)
    weights: Rows = {
        names[name]: (weight.detach(), shards.parts.get(name)) for name, weight in model.named_parameters()
    }
    kept: Rows = {key: (tensor, state_part(key, shards)) for key, tensor in sorted(optimizer.state.items())}
    sharded = [(rows, part) for rows, part in (*weights.values(), *kept.values()) if part is not None]
    numbers = {id(rows): number for number, (rows, _) in enumerate(sharded)}

    def requested(number: int = DONE) -> int:
        """The number that process 0 names, on all processes."""
        told = torch.tensor([number], device=model.embedding.device)
        dist.broadcast(told, 0)
        return int(told)

    def write_rows(tensors: Rows, path: Path) -> None:
        def gathered(name: str) -> AbstractContextManager[Tensor]:
            rows, part = tensors[name]
            if part is None:
                return nullcontext(rows)
            requested(numbers[id(rows)])
            return nullcontext(shards.gather_rows(rows, part))

        whole = {
            name: rows if part is None else rows.new_empty((part.shape[0], *rows.shape[1:]), device="meta")
            for name, (rows, part) in tensors.items()
        }
        write_safetensors(whole, path, gathered)

    def write(folder: Path) -> None:
        write_rows(weights, folder / WEIGHTS_FILE)
        hf_format.write_config(model.config, folder, model.embedding.dtype)
        (folder / STATE).mkdir()
        write_rows(kept, folder / STATE / OPTIMIZER_FILE)
        write_companions(folder, tokenizer, state, answers)

    if shards.rank == 0:
        try:
            checkpoints.save(state.step, write, is_best)
        finally:
            requested(DONE)
    else:
        while (number := requested()) != DONE:
            shards.gather_rows(*sharded[number])
    dist.barrier()  # nobody continues before the folder has its name
