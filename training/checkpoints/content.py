"""The content of a checkpoint: a model folder that others can load, and beside it what resuming needs.

`state/` holds the optimizer's tensors and the training state, for any number of processes.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from safetensors import safe_open

from data.tokenizers.tokenizer import Tokenizer
from engine.optimizers import Optimizer
from model import hf_format
from model.formats.answering import keep_answer_list, keep_answers
from model.formats.checksums import STATE
from model.formats.peft import save_adapters
from model.formats.sentence_transformers import TextSettings, write_text_settings
from model.formats.tensor_files import write_safetensors
from model.t5 import T5, WithWeights, in_place
from settings.declared import GenerateConfig
from settings.errors import UserError
from settings.fields import listed
from support.language import say
from training.checkpoints.state import TRAINING_FILE, TrainingState, read_training_state

OPTIMIZER_FILE = "optimizer.safetensors"
GREEDY = GenerateConfig()


def write_checkpoint(
    folder: Path,
    model: T5,
    optimizer: Optimizer,
    tokenizer: Tokenizer,
    state: TrainingState,
    *,
    answers: GenerateConfig | None = GREEDY,
    listed_in: Path | None = None,
    texts: TextSettings | None = None,
    num_answers: int = 1,
    with_weights: WithWeights = in_place,
) -> None:
    """Write everything into an empty folder; the caller makes it appear at once. Memory: a few MB of buffers.

    Of a model with adapters these alone are written, with the folder and the fingerprint of their base.

    Args:
        answers: how the model shall answer, see `model.formats.answering`; None: it writes none.
        listed_in: the folder with the list that its answers come from; None: any answer.
        texts: how a model that gives vectors reads texts.
        num_answers: how many an evaluation scores.
        with_weights: a context in which a weight is in memory, where some are offloaded.
    Raises:
        OSError: the folder cannot be written.
    """
    about = model.adapter_info
    if about is None:
        hf_format.save(model, folder, with_weights=with_weights)
    else:
        save_adapters(model, about.settings, folder, about.base, about.fingerprint)
    (folder / STATE).mkdir()
    write_safetensors(optimizer.state, folder / STATE / OPTIMIZER_FILE)
    if answers is not None:
        keep_answers(folder, answers, num_answers)
    if listed_in is not None:
        keep_answer_list(folder, listed_in)
    write_text_settings(folder, texts or TextSettings())
    tokenizer.save(folder)
    (folder / STATE / TRAINING_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf8")


def load_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Load the optimizer's tensors of a checkpoint.

    Raises:
        UserError: they belong to another model, are broken, or not all there.
    """
    path = folder / STATE / OPTIMIZER_FILE
    if not path.is_file():
        raise UserError(
            "checkpoint = {folder}, its optimizer state is not there; copy the checkpoint again, or continue from its "
            "weights alone with --finetune_from",
            folder=folder,
        )
    try:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            for key in keys:  # One after the other: the optimizer copies it.
                optimizer.load_state({key: file.get_tensor(key)})
    except KeyError as error:
        raise UserError(
            "checkpoint = {folder}, its optimizer state has {error}, which this model does not have",
            folder=folder,
            error=error,
        ) from None
    except Exception as error:  # For a broken file, safetensors raises a class of its own.
        raise UserError(
            "checkpoint = {folder}, its optimizer state cannot be read: {error}", folder=folder, error=error
        ) from None
    missing = optimizer.incomplete()
    if not keys:
        state = read_training_state(folder)
        # Before the first step there is none, and with a loss scale every step so far may have been left out.
        missing = [say("all of it")] if state.step and state.loss_scaling is None else []
    if missing:
        raise UserError(
            "checkpoint = {folder}, its optimizer state lacks tensors or has them in another form: {shown}; copy "
            "the checkpoint again, or continue from its weights alone with --finetune_from",
            folder=folder,
            shown=listed(missing, most=3),
        )
