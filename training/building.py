"""What is trained, and by what? Model, optimizer, walk and update, made as the plan says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from devices.base import Device
from engine.keep import Keep
from engine.optimizers import OPTIMIZERS, Optimizer
from engine.residency import residency_for
from engine.rounding import ROUNDINGS
from engine.update import Update
from engine.walk import Walk
from memory.prediction import Choice
from model import hf_format
from model.loss import LossSettings
from model.t5 import T5
from training.startup import Start
from training.state import load_optimizer


@dataclass
class Engine:
    """The parts of a step."""

    model: T5
    optimizer: Optimizer
    walk: Walk
    update: Update

    def follow(self, choice: Choice) -> None:
        """Go on in another way: graphs kept and chunks of the loss as `choice` says; dtypes stay."""
        self.walk.keep = Keep(choice.kept_blocks)
        self.walk.loss_settings = replace(self.walk.loss_settings, chunk_bytes=choice.loss_chunk_bytes)


def build(begin: Start, choice: Choice, device: Device) -> Engine:
    """Make the model, fill or load it, and put the engine around it; everything lies on the device, checked.

    Raises:
        UserError: the checkpoint to start from is broken or of another shape.
    Memory: the weights and, resuming, the optimizer's state.
    """
    config, storage = begin.config, getattr(torch, choice.storage)
    if begin.base is None:
        model = T5(config.model, device.torch_device, storage).initialise(config.run.seed)
    else:
        model = hf_format.load(begin.base, dtype=storage, device=device.torch_device, expect=config.model)
    model.config.dropout_rate = config.model.dropout_rate
    rounding = ROUNDINGS[config.train.bf16_rounding]()
    optimizer = OPTIMIZERS[config.train.optimizer](dict(model.named_parameters()), rounding)
    if begin.is_resumed and begin.base is not None:
        load_optimizer(begin.base, optimizer, device.torch_device)
    device.check_placement([*model.named_parameters(), *optimizer.state.items()])
    loss = LossSettings(choice.loss_chunk_bytes, config.train.label_smoothing, config.train.z_loss)
    residency = residency_for(storage, getattr(torch, choice.compute))
    walk = Walk(model, Keep(choice.kept_blocks), residency, loss, config.model.dropout_rate)
    return Engine(model, optimizer, walk, Update(optimizer, config.train.max_grad_norm))
