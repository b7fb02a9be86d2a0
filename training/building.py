"""What is trained, and by what? Model, optimizer, walk and update, made as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from devices.base import Device
from devices.kernels.calls import use
from devices.malloc import trim_malloc
from engine.checkpointing import Checkpointing
from engine.finite import OnReady
from engine.micro_batches import MicroBatch
from engine.offload import CheckpointedActivations, Offload
from engine.optimizers import OPTIMIZERS, Optimizer
from engine.rounding import ROUNDINGS
from engine.scaling import LossScaling
from engine.sharding import ShardedWeightStore, Shards
from engine.update import Update
from engine.walk import Walk, no_trim
from engine.weights import weight_store_for
from memory.prediction import Choice
from model import hf_format
from model.checksums import STATE
from model.loss import LossSettings
from model.t5 import T5
from training.adapters import choose_trained, home_of
from training.preference import objective_of
from training.schedules import layerwise_factors
from training.sharded_state import load_optimizer_share
from training.startup import Start
from training.state import OPTIMIZER_FILE, load_optimizer


@dataclass
class Engine:
    """The parts of a step."""

    model: T5
    optimizer: Optimizer
    walk: Walk
    update: Update
    device: Device
    shards: Shards | None = None

    @property
    def loss_scaling(self) -> dict[str, float] | None:
        """What a checkpoint keeps of the loss scale; None without fp16."""
        return None if self.update.scaling is None else self.update.scaling.as_dict()

    def gradients(
        self, micro_batches: list[MicroBatch], total_labels: int, accumulation_passes: int, on_ready: OnReady
    ) -> torch.Tensor:
        """Form the gradients of one step: in one accumulation pass over all micro-batches, or in several.

        Args:
            micro_batches: is emptied, so that those of a pass are freed before the next one.
            total_labels: labels (or pairs of answers) of the whole effective batch, over all micro-batches and processes.
            accumulation_passes: at most this many. on_ready: as of `Walk.gradients`; only the last pass hands over.
        Returns:
            the summed loss, a fp32 scalar on the device.
        Memory: that of one pass; from the second on, beside the gradients of all weights.
        """
        size = max(1, -(-len(micro_batches) // accumulation_passes))
        total = torch.zeros((), device=self.device.torch_device)
        while micro_batches:
            members = micro_batches[:size]
            del micro_batches[:size]
            total += self.walk.gradients(members, total_labels, _hold_back if micro_batches else on_ready)
        return total

    def follow(self, choice: Choice) -> None:
        """Follow a changed plan: saved blocks, chunks of the loss and offload as `choice` says; dtypes stay."""
        self.walk.checkpointing = Checkpointing(choice.saved_blocks)
        self.walk.loss_settings = replace(self.walk.loss_settings, chunk_bytes=choice.loss_chunk_bytes)
        self.walk.trim = _trim(choice, self.device)
        if choice.offload_boundaries != isinstance(self.walk.checkpointed, Offload):
            self.walk.checkpointed = _checkpointed(choice, self.device)


def _hold_back(weights: Sequence[nn.Parameter]) -> None:
    """Hand nothing over: the gradients stay, and the next pass adds to them."""


def build(begin: Start, choice: Choice, device: Device) -> Engine:
    """Make the model, fill or load it, and put the engine around it; everything lies on the device, checked.

    Raises:
        UserError: the checkpoint to start from is broken or of another shape.
    Memory: the weights and, resuming, the optimizer's state.
    """
    config, storage = begin.config, getattr(torch, choice.storage)
    use(choice.kernels)
    device.set_exact_fp32(config.memory.mixed_precision == "no")
    shards = None if choice.shards == 1 else Shards(dist.get_rank(), dist.get_world_size())
    model = _make_model(begin, storage, device, shards)
    model.config.dropout_rate = config.model.dropout_rate
    rounding = ROUNDINGS[config.train.bf16_rounding]()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    factors = layerwise_factors(
        weights, config.model.num_layers, config.model.num_decoder_layers, config.train.layerwise_decay
    )
    optimizer = OPTIMIZERS[config.train.optimizer](weights, rounding, factors)
    optimizer.shards = shards
    if begin.is_resumed and begin.base is not None:
        if shards is None and (begin.base / STATE / OPTIMIZER_FILE).is_file():
            load_optimizer(begin.base, optimizer, device.torch_device)
        else:
            load_optimizer_share(begin.base, optimizer, device.torch_device, shards)
    device.check_placement([*model.named_parameters(), *optimizer.state.items()])
    loss = LossSettings(choice.loss_chunk_bytes, config.train.label_smoothing, config.train.z_loss)
    compute = getattr(torch, choice.compute)
    tables = (model.embedding, model.output_weight)
    weight_store = weight_store_for(storage, compute, tables) if shards is None else ShardedWeightStore(compute, shards)
    scaling = LossScaling(**(begin.state.loss_scaling or {})) if compute == torch.float16 else None
    walk = Walk(
        model, Checkpointing(choice.saved_blocks), weight_store, loss, config.model.dropout_rate, objective_of(config, model),
        scaling, _checkpointed(choice, device), getattr(torch, choice.between_blocks), _trim(choice, device),
    )  # fmt: skip
    return Engine(model, optimizer, walk, Update(optimizer, config.train.max_grad_norm, scaling), device, shards)


def _checkpointed(choice: Choice, device: Device) -> CheckpointedActivations:
    return Offload(device.host_copies()) if choice.offload_boundaries else CheckpointedActivations()


def _trim(choice: Choice, device: Device) -> Callable[[], object]:
    return trim_malloc if choice.malloc == "fast" and not device.is_separate_memory else no_trim


def _make_model(begin: Start, storage: torch.dtype, device: Device, shards: Shards | None) -> T5:
    """The model, filled or loaded, its adapters on; where it is sharded, this process's rows of it, and never more."""
    config, place = begin.config, device.torch_device
    cut = None if shards is None else partial(shards.cut, device=place)
    home = None if begin.base is None else home_of(begin.base, config)
    if home is not None:
        model = hf_format.load(home, dtype=storage, device=place, expect=config.model, cut=cut)
    elif cut is None:
        model = T5(config.model, place, storage).initialise(config.run.seed)
    else:
        empty = T5(config.model, "meta", storage)
        model = empty.initialise(config.run.seed, cut(empty))
    return choose_trained(model, config, begin.base, home)
