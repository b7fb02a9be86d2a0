"""How do processes that hold a share of the weights each write one checkpoint, and read it again in any number?

The model becomes the same Hugging Face folder as ever: process 0 writes it and asks the others for one matrix at a time,
so that nobody ever holds more. Of the optimizer's state each process writes its rows, see `training/checkpoints/pieces.py`; it is
read again by any number of processes, sharded or not, and a sharded run reads the state of a whole one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from config import GenerateConfig
from data.tokenizers.tokenizer import Tokenizer
from engine.optimizers import Optimizer
from engine.sharing.sharding import Part, Shards
from model import hf_format
from model.formats.answering import keep_answers
from model.formats.checksums import STATE
from model.formats.headers import WEIGHTS_FILE
from model.formats.tensor_files import write_safetensors
from model.shapes import hf_names
from model.t5 import T5
from settings.errors import UserError
from training.checkpoints.folder import Checkpoints
from training.checkpoints.pieces import INDEX, Pieces, write_index, write_rows
from training.checkpoints.state import GREEDY, OPTIMIZER_FILE, TRAINING_FILE, TrainingState, take_state

PIECES = "shards"
ALIKE_EVERYWHERE = ("columns", "size")  # state of a sharded matrix that each process has whole
DONE = -1


class _Asked:
    """Stands for a sharded matrix while a folder is written; its numbers come when they are wanted."""

    def __init__(self, part: Part, dtype: torch.dtype, fetch: Callable[[], Tensor]) -> None:
        self.shape, self.dtype, self._fetch = torch.Size(part.shape), dtype, fetch
        self.nbytes = part.shape[0] * part.shape[1] * dtype.itemsize

    def element_size(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    def to(self, device: str) -> Tensor:
        """The whole matrix. Memory: the matrix."""
        return self._fetch().to(device)


def save_sharded(
    checkpoints: Checkpoints, model: T5, tokenizer: Tokenizer, optimizer: Optimizer, state: TrainingState, shards: Shards,
    is_best: bool = False, answers: GenerateConfig = GREEDY,
) -> Path:  # fmt: skip
    """Write a checkpoint; every process calls this at the same time. Memory: the largest matrix.

    Raises:
        UserError: the disk is full or cannot be written.
    """

    def write(folder: Path) -> None:
        _for_all(str(folder))
        _write_pieces(folder, optimizer, shards)
        with _lending(model, shards) as tensors:
            write_safetensors(tensors, folder / WEIGHTS_FILE)
        hf_format.write_config(model.config, folder, model.embedding.dtype)
        keep_answers(folder, answers)
        tokenizer.save(folder)
        (folder / STATE / TRAINING_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf8")

    if shards.rank != 0:
        try:
            _write_pieces(Path(_for_all(None)), optimizer, shards)
        except OSError as error:
            raise checkpoints.failure(state.step, error) from error
        _lend(model, shards)
    path = checkpoints.save(state.step, write, is_best)
    dist.barrier()  # nobody continues before the folder has its name
    return path


def load_optimizer_share(folder: Path, optimizer: Optimizer, device: torch.device, shards: Shards | None) -> None:
    """Load this process's share of the optimizer's state of a checkpoint, however many processes have written it.

    Raises:
        UserError: the state belongs to another model or is broken.
    """
    if not has_pieces(folder) and not (folder / STATE / OPTIMIZER_FILE).is_file():
        raise UserError(
            f"checkpoint = {folder}, its optimizer state is not there, or in a form that can run code, as earlier versions "
            "wrote it where weights were sharded; continue from its weights alone with --finetune_from"
        )
    read = partial(_read_pieces, folder / STATE / PIECES) if has_pieces(folder) else partial(_read_rows, folder)
    take_state(folder, optimizer, lambda: read(shards, device))


def has_pieces(folder: Path) -> bool:
    """Whether a checkpoint's optimizer state was written by a sharded run."""
    return (folder / STATE / PIECES / INDEX).is_file()


# --- the optimizer's state ---


def _part(key: str, shards: Shards | None) -> Part | None:
    name, _, kind = key.rpartition("/")
    return None if shards is None or kind in ALIKE_EVERYWHERE else shards.parts.get(name)


def _write_pieces(folder: Path, optimizer: Optimizer, shards: Shards) -> None:
    """Every process writes its rows; returns on all once all have.

    Raises:
        OSError: one of them could not.
    """
    rows = {key: (tensor, part.first) for key, tensor in optimizer.state.items() if (part := _part(key, shards))}
    if shards.rank == 0:
        rows |= {key: (tensor, 0) for key, tensor in optimizer.state.items() if key not in rows}
    done: list[Any] = [None] * shards.num_processes
    try:
        mine: Any = write_rows(folder / STATE / PIECES, shards.rank, rows)
    except (OSError, SafetensorError) as error:
        mine = f"process {shards.rank}: {' '.join(str(error).split())}"
    dist.all_gather_object(done, mine)
    if failed := [told for told in done if isinstance(told, str)]:
        raise OSError("; ".join(failed))
    if shards.rank == 0:
        write_index(folder / STATE / PIECES, done)


def _read_pieces(folder: Path, shards: Shards | None, device: torch.device) -> dict[str, Tensor]:
    """This process's rows of a state that was written in pieces."""
    stored, state = Pieces(folder), {}
    for key in stored.keys():  # noqa: SIM118  # no mapping
        part = _part(key, shards)
        state[key] = stored.read(key, device, *(() if part is None else (part.first, part.count)))
    return state


def _read_rows(folder: Path, shards: Shards | None, device: torch.device) -> dict[str, Tensor]:
    """This process's rows of a state that was written whole."""
    state = {}
    with safe_open(folder / STATE / OPTIMIZER_FILE, framework="pt") as stored:
        for key in stored.keys():  # noqa: SIM118  # an open file is no mapping
            part = _part(key, shards)
            rows = slice(None) if part is None else slice(part.first, part.first + part.count)
            state[key] = stored.get_slice(key)[rows].to(device)
    return state


# --- the model ---


@contextmanager
def _lending(model: T5, shards: Shards) -> Iterator[dict[str, Any]]:
    """Hugging Face name -> tensor, of all weights; while it is open, the other processes answer for their rows."""
    weights = dict(model.named_parameters())

    def fetch(index: int, name: str) -> Tensor:
        _ask(index, model)
        return shards.gather(weights[name])

    tensors, names = {}, hf_names(model.config)
    for index, (name, weight) in enumerate(weights.items()):
        part = shards.parts.get(name)
        asked = None if part is None else _Asked(part, weight.dtype, lambda i=index, n=name: fetch(i, n))  # type: ignore[misc]
        tensors[names[name]] = weight.detach() if asked is None else asked
    try:
        yield tensors
    finally:
        _ask(DONE, model)


def _lend(model: T5, shards: Shards) -> None:
    """Answer process 0 until it has everything."""
    weights = list(model.parameters())
    while (index := _ask(DONE, model)) != DONE:
        shards.gather(weights[index])


def _ask(index: int, model: T5) -> int:
    """The number that process 0 names, on all processes."""
    number = torch.tensor([index], device=model.embedding.device)
    dist.broadcast(number, 0)
    return int(number)


def _for_all(text: str | None) -> str:
    """The text of process 0, on all processes."""
    box = [text]
    dist.broadcast_object_list(box, 0)
    assert box[0] is not None
    return box[0]
