"""How is a checkpoint written? By the main process alone, or by all together where each holds a share of the weights."""

from __future__ import annotations

from pathlib import Path

from data.tokenizer import Tokenizer
from training.building import Engine
from training.checkpoints import Checkpoints
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
