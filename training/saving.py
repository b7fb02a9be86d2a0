"""How is a checkpoint written? By the main process alone, or by all together where each holds a share of the weights.

Before that the model has to show that it is sound: that a step's loss was finite says nothing of what its update has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator

from data.tokenizer import Tokenizer
from engine.finite import is_finite
from engine.micro_batches import MicroBatch
from memory.recovery import drop_frames
from training.building import Engine
from training.checkpoints import Checkpoints
from training.processes import sum_over
from training.sharded_state import save_sharded
from training.state import TrainingState, write_checkpoint


def save(checkpoints: Checkpoints, engine: Engine, tokenizer: Tokenizer, state: TrainingState, is_best: bool) -> Path:
    """Write the checkpoint of the step that `state` says; every process calls this. Returns its folder.

    Raises:
        UserError: the disk is full or cannot be written.
    Memory: a few MB of buffers; of sharded weights, the largest matrix.
    """
    model, optimizer = engine.model, engine.optimizer
    if engine.shards is not None:
        return save_sharded(checkpoints, model, tokenizer, optimizer, state, engine.shards, is_best)
    return checkpoints.save(
        state.step, lambda folder: write_checkpoint(folder, model, tokenizer, optimizer, state), is_best
    )


def is_sound(engine: Engine, micro_batches: Sequence[MicroBatch], accelerator: Accelerator) -> bool:
    """Whether a model may be saved: weights and optimizer state are finite, and so is a loss that is formed with them.

    Args:
        micro_batches: micro-batches to form it of; where memory does not suffice even for that, the weights alone answer.
    Returns:
        the same on all processes, which ask together.
    Memory: a forward without gradients.
    """
    tensors = [*engine.model.parameters(), *engine.optimizer.state.values()]
    loss = torch.zeros(())
    try:
        loss = engine.walk.loss(micro_batches) if micro_batches else loss
    except Exception as error:
        if engine.shards is not None or not engine.device.is_out_of_memory(error):
            raise
        drop_frames(error)
    is_lost = not (is_finite([loss]) and is_finite(t.detach() for t in tensors if t.is_floating_point()))
    return not sum_over(accelerator, float(is_lost))[0]
