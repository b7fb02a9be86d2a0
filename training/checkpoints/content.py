"""The content of a checkpoint: a model folder that others can load, and beside it what resuming needs.

`state/` holds the optimizer's tensors and the training state. Where processes each hold rows of weights and optimizer state, the files
are the same: process 0 writes them and asks the others for one matrix at a time, so that nobody ever holds more. They are read again
by any number of processes, sharded or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from data.tokenizers.tokenizer import Tokenizer
from engine.optimizers import Optimizer
from engine.sharding import Part, Shards
from language import say
from model import hf_format
from model.formats.answering import keep_answer_list, keep_answers
from model.formats.checksums import STATE
from model.formats.headers import WEIGHTS_FILE
from model.formats.peft import save_adapters
from model.formats.shape_file import published_names
from model.formats.tensor_files import write_safetensors
from model.t5 import T5, WithWeights, in_place
from settings.declared import GenerateConfig
from settings.errors import UserError
from settings.fields import listed
from training.checkpoints.folder import Checkpoints
from training.checkpoints.state import TRAINING_FILE, TrainingState, read_training_state

OPTIMIZER_FILE = "optimizer.safetensors"
ALIKE_EVERYWHERE = ("columns", "size")  # state of a sharded matrix that each process has whole
GREEDY = GenerateConfig()
# name -> rows held here, and which of the whole they are; None: the whole
Rows = Mapping[str, tuple[Tensor, Part | None]]
DONE = -1


def write_checkpoint(
    folder: Path, model: T5, optimizer: Optimizer, companions: Callable[[Path], None], held: WithWeights = in_place
) -> None:
    """Write everything into an empty folder; the caller makes it appear at once. Memory: a few MB of buffers.

    Of a model with adapters these alone are written, with the place and the fingerprint of their base.

    Args:
        companions: writes what is beside the tensors, see `write_companions`.
        held: a context in which a weight is in memory, where some rest elsewhere.
    """
    about = model.adapter_info
    if about is None:
        hf_format.save(model, folder, held=held)
    else:
        save_adapters(model, about.settings, folder, about.base, about.fingerprint)
    (folder / STATE).mkdir()
    write_safetensors(optimizer.state, folder / STATE / OPTIMIZER_FILE)
    companions(folder)


def write_companions(
    folder: Path, tokenizer: Tokenizer, state: TrainingState, answers: GenerateConfig | None = GREEDY,
    listed_in: Path | None = None, num_answers: int = 1,
) -> None:  # fmt: skip
    """Write what a checkpoint has beside its tensors; raises OSError.

    Args:
        answers: how the model shall answer, see `model.formats.answering`; None: it writes none.
        listed_in: the folder with the list that its answers come from; None: any answer. num_answers: that an evaluation scores.
    """
    if answers is not None:
        keep_answers(folder, answers, num_answers)
    if listed_in is not None:
        keep_answer_list(folder, listed_in)
    tokenizer.save(folder)
    (folder / STATE / TRAINING_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf8")


def save_sharded(
    checkpoints: Checkpoints, step: int, model: T5, optimizer: Optimizer, shards: Shards,
    companions: Callable[[Path], None], is_best: bool = False,
) -> None:  # fmt: skip
    """Write a checkpoint; every process calls this at the same time. Memory: the largest matrix, of weights or state.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    names = published_names(model.config)
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
        companions(folder)

    if shards.rank == 0:
        try:
            checkpoints.save(step, write, is_best)
        finally:
            requested(DONE)
    else:
        while (number := requested()) != DONE:
            shards.gather_rows(*sharded[number])
    dist.barrier()  # nobody continues before the folder has its name


def state_part(key: str, shards: Shards | None) -> Part | None:
    """Which rows of a state tensor this process holds; None: all of them."""
    name, _, kind = key.rpartition("/")
    return None if shards is None or kind in ALIKE_EVERYWHERE else shards.parts.get(name)


def load_optimizer(folder: Path, optimizer: Optimizer, device: torch.device, shards: Shards | None = None) -> None:
    """Load this process's rows of the optimizer's tensors of a checkpoint, however many processes have written it.

    Raises:
        UserError: they belong to another model, are broken, or not all there.
    """
    path, loaded = folder / STATE / OPTIMIZER_FILE, dict[str, Tensor]()
    try:
        with safe_open(path, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118  # an open file is no mapping
                part = state_part(key, shards)
                if part is None:
                    loaded[key] = stored.get_tensor(key).to(device)
                else:
                    loaded[key] = stored.get_slice(key)[part.first : part.first + part.count].to(device)
        optimizer.load_state(loaded)
    except KeyError as error:
        raise UserError(
            "checkpoint = {folder}, its optimizer state has {error}, which this model does not have",
            folder=folder,
            error=error,
        ) from None
    except Exception as error:  # safetensors raises its own class for a broken file
        raise UserError(
            "checkpoint = {folder}, its optimizer state cannot be read: {error}", folder=folder, error=error
        ) from None
    missing = optimizer.incomplete() if loaded else []
    if not loaded:
        trained = read_training_state(folder)  # with a loss scale, every step so far may have been left out
        missing = [say("all of it")] if trained.step and trained.loss_scaling is None else []
    if missing:
        shown = listed(missing, most=3)
        raise UserError(
            "checkpoint = {folder}, its optimizer state lacks tensors or has them in another form: {shown}; copy "
            "the checkpoint again, or continue from its weights alone with --finetune_from",
            folder=folder,
            shown=shown,
        )
