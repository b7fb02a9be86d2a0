"""When and how a checkpoint is written, by the main process alone.

Before that the model has to show that it is sound: that a step's loss was finite says nothing of what its update has
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from loguru import logger

from engine.optimizer_in_backward import is_finite, norm_of
from engine.step import Engine, to_micro_batch
from memory.cleanup import drop_frames
from model.formats.sentence_transformers import TextSettings
from model.micro_batch import MicroBatch
from training.checkpoints.content import write_checkpoint
from training.checkpoints.folder import name_of
from training.live import LiveRun
from training.processes.group import Group


def save(live: LiveRun, is_best: bool) -> bool:
    """Write a checkpoint. False: the model is not finite, nothing was written.

    Raises:
        UserError: the disk is full or cannot be written.
    Memory: a few MB of buffers.
    """
    step = live.state.step
    engine = live.engine
    with live.monitor.phase("evaluation"):
        batches = live.batches(max(step, 1))[:1]
        sizes = engine.plan.sizes
        micro_batches = [to_micro_batch(batch, live.shape, engine.device.torch_device, sizes) for batch in batches]
        if not is_sound(engine, micro_batches, live.group):
            return False
    path = live.checkpoints.folder / name_of(step)
    write = partial(
        write_checkpoint,
        model=engine.model,
        optimizer=engine.update.optimizer,
        tokenizer=live.run.tokenizer,
        state=live.checkpoint_state(),
        answers=live.decoding if live.task.writes_text else None,
        listed_in=None if live.run.tree is None else live.run.run_dir,
        texts=TextSettings.of(live.run.config.data) if live.shape.gives_vectors else None,
        num_answers=live.num_answers,
        with_weights=engine.blockwise.weight_store.loaded,
    )
    with live.monitor.phase("save"):
        if live.is_main:
            live.checkpoints.save(step, write, is_best)
    logger.info("step {} saved to {}", step, path)
    live.log.event("checkpoint", step=step, path=path, best=is_best)
    live.last_good = step
    live.has_saved = True
    return True


def is_sound(engine: Engine, micro_batches: Sequence[MicroBatch], group: Group) -> bool:
    """Whether a model may be saved: weights and optimizer state are finite, and so is a loss that is formed with them.

    Args:
        micro_batches: micro-batches to form it of; where memory does not suffice even for that, the weights alone
            answer.
    Returns:
        the same on all processes, which ask together.
    Memory: a forward without gradients.
    """
    tensors = chain(
        engine.blockwise.weight_store.each_loaded(engine.model.parameters()), engine.update.optimizer.state.values()
    )
    loss = torch.zeros(())
    try:
        loss = engine.blockwise.loss(micro_batches) if micro_batches else loss
    except Exception as error:
        if not engine.device.is_out_of_memory(error):
            raise
        drop_frames(error)
    # Offloaded weights are in memory one after the other.
    norms = [norm_of([tensor.detach()]) for tensor in tensors if tensor.is_floating_point()]
    is_lost = not (is_finite([loss]) and is_finite(norms))
    return not group.all_reduce_sum(float(is_lost))[0]
