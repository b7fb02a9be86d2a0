"""Model, optimizer and engine, made as the plan says."""

from __future__ import annotations

from pathlib import Path

import torch

from data.tokenizers.published import has_tokenizer
from data.tokenizers.tokenizer import Tokenizer
from devices.base import Device, dtype_of
from devices.kernels.calls import use
from engine.all_reduce import Reducer
from engine.blockwise import Blockwise
from engine.compiled import compile_parts
from engine.loss_scaling import LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS
from engine.step import Engine
from engine.weight_offload.store import OffloadedWeightStore, offloaded_store
from engine.weights import WeightStore, weight_store_for
from memory.estimate.workload import ExecutionPlan
from memory.weights_in import weights_folder
from model import hf_format
from model.loss import LossSettings
from model.t5 import T5, in_memory
from training.checkpoints.content import load_optimizer
from training.setup.adapters import choose_trained
from training.setup.resolved import ResolvedRun


def build(run: ResolvedRun, choice: ExecutionPlan) -> Engine:
    """Make the model, fill or load it, and put the engine around it; everything lies on the device, checked.

    Raises:
        UserError: the checkpoint to start from is broken or of another shape.
    Memory: the weights and, resuming, the optimizer's state.
    """
    config, device, group = run.config, run.device, run.group
    storage, compute, between_blocks = map(dtype_of, choice.precision)
    use(choice.kernels)
    device.set_exact_fp32(config.memory.mixed_precision == "no")
    offloaded = offloaded_store(choice, device, weights_folder(config.memory, config.run), group.size)
    model = _make_model(run, storage, device, offloaded)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = OPTIMIZERS[config.train.optimizer](weights)
    if run.is_resumed and run.base is not None:
        load_optimizer(run.base, optimizer)
    device.check_placement([*model.named_parameters(), *optimizer.state.items()])
    loss = LossSettings(choice.loss_chunk_bytes, config.train.label_smoothing)
    tables = (model.embedding, model.output_weight)
    weight_store: WeightStore = offloaded or weight_store_for(storage, compute, tables)
    scaling = LossScaling(**(run.state.loss_scaling or {})) if compute == torch.float16 else None
    blockwise = Blockwise(
        model,
        choice.saved_blocks,
        weight_store,
        loss,
        config.model.dropout_rate,
        config.task.objective(model, config.train, config.preference, config.lora),
        scaling,
        between_blocks_dtype=between_blocks,
        parts=compile_parts() if choice.compiled else None,
    )
    reducer = Reducer(group.hosts) if group.size > 1 else None
    update = OptimizerInBackward(optimizer, config.train.max_grad_norm, scaling, weight_store, reducer)
    return Engine(blockwise, update, device, choice, group.all_reduce_sum)


def _pieces_of_new_tokens(run: ResolvedRun, home: Path) -> dict[int, list[int]]:
    """Id -> ids in the tokenizer of the base, of each token that `extra_tokens` adds to it; a probe has no tokenizer."""
    if run.config.data.extra_tokens is None or not hasattr(run, "tokenizer") or not has_tokenizer(home):
        return {}
    base = Tokenizer.load(home)
    new = range(base.size, run.tokenizer.size)
    encoded = base.encode_batch([run.tokenizer.id_to_token(number) or "" for number in new])
    return {number: ids[ids != base.unk_id].tolist() for number, ids in zip(new, encoded, strict=True)}


def _make_model(run: ResolvedRun, storage: torch.dtype, device: Device, offloaded: OffloadedWeightStore | None) -> T5:
    """The model, filled or loaded, its adapters on."""
    config, place = run.config, device.torch_device
    allocate, filling = (None, in_memory) if offloaded is None else (offloaded.allocate, offloaded.filling)
    home = None if run.start is None else run.start.base
    if home is not None:
        model = hf_format.load(
            home,
            dtype=storage,
            device=place,
            expect=config.model,
            allocate=allocate,
            filling=filling,
            seed=config.run.seed,
            pieces=_pieces_of_new_tokens(run, home),
            maps=config.lora.lora_rank > 0 and offloaded is None and device.name == "cpu",
        )
    elif offloaded is None:
        model = T5(config.model, place, storage).initialise(config.run.seed)
    else:
        model = T5(config.model, "meta", storage)
        offloaded.allocate(model)
        model.initialise(config.run.seed, filling)
    return choose_trained(model, config, run.base, home)
