"""When and how is a checkpoint written? By the main process alone, or by all together where each holds a share of the weights.

Before that the model has to show that it is sound: that a step's loss was finite says nothing of what its update has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from loguru import logger

from config import GenerateConfig
from engine.finite import is_finite, norm_of
from engine.micro_batches import MicroBatch
from engine.step import Engine
from memory.recovery import drop_frames
from training.checkpoints.folder import name_of
from training.checkpoints.mirror import Mirror
from training.checkpoints.sharded_state import save_sharded
from training.checkpoints.state import TrainingState, write_checkpoint
from training.live import LiveRun
from training.processes.group import Group


class Saver:
    """Writes the checkpoints of one run.

    Args:
        live: the run. mirror: where they are copied; None: nowhere.
    """

    def __init__(self, live: LiveRun, mirror: Mirror | None) -> None:
        self.live, self.mirror = live, mirror

    def save(self, is_best: bool) -> bool:
        """Write a checkpoint, and copy it where a mirror is named; False: the model is not finite, nothing was written."""
        live, step = self.live, self.live.state.step
        with live.monitor.phase("evaluation"):
            micro_batches = [live.engine.micro_batch(batch) for batch in live.batches(max(step, 1))[:1]]
            if not is_sound(live.engine, micro_batches, live.group):
                return False
        state = live.checkpoint_state()
        with live.monitor.phase("save"):
            answers = replace(live.config.generate, max_new_tokens=live.longest_answer)
            path = self._write(state, is_best, answers)
        live.log.event("checkpoint", step=step, path=path, best=is_best)
        logger.info("step {} saved to {}", step, path)
        if self.mirror is not None and live.is_main:
            problem = self.mirror.push(live.start.run_dir, path)
            if problem is not None:
                live.log.tell(problem)
        live.saved()
        return True

    def _write(self, state: TrainingState, is_best: bool, answers: GenerateConfig) -> Path:
        """Write the checkpoint of the step that `state` says; its folder.

        Raises:
            UserError: the disk is full or cannot be written.
        Memory: a few MB of buffers; of sharded weights, the largest matrix.
        """
        checkpoints, engine, tokenizer = self.live.checkpoints, self.live.engine, self.live.start.tokenizer
        model, optimizer = engine.model, engine.optimizer
        if engine.shards is not None:
            save_sharded(checkpoints, model, tokenizer, optimizer, state, engine.shards, is_best, answers)
        elif self.live.is_main:
            held = engine.walk.weight_store.held
            write = lambda folder: write_checkpoint(folder, model, tokenizer, optimizer, state, held, answers)  # noqa: E731
            checkpoints.save(state.step, write, is_best)
        return checkpoints.folder / name_of(state.step)


def is_sound(engine: Engine, micro_batches: Sequence[MicroBatch], group: Group) -> bool:
    """Whether a model may be saved: weights and optimizer state are finite, and so is a loss that is formed with them.

    Args:
        micro_batches: micro-batches to form it of; where memory does not suffice even for that, the weights alone answer.
    Returns:
        the same on all processes, which ask together.
    Memory: a forward without gradients.
    """
    tensors = chain(engine.walk.weight_store.each_held(engine.model.parameters()), engine.optimizer.state.values())
    loss = torch.zeros(())
    try:
        loss = engine.walk.loss(micro_batches) if micro_batches else loss
    except Exception as error:
        if engine.shards is not None or not engine.device.is_out_of_memory(error):
            raise
        drop_frames(error)
    norms = [norm_of([tensor.detach()]) for tensor in tensors if tensor.is_floating_point()]  # each while it is held
    is_lost = not (is_finite([loss]) and is_finite(norms))
    return not group.all_reduce_sum(float(is_lost))[0]
