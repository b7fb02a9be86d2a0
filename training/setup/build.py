"""Model, optimizer and engine, made as the plan says."""

from __future__ import annotations

from pathlib import Path

import torch

from data.tokenizers.published import has_tokenizer
from data.tokenizers.tokenizer import Tokenizer
from devices.base import dtype_of
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
from training.setup.resolved import Beginning


def build(run: Beginning, choice: ExecutionPlan) -> Engine:
    """Make the model, fill or load it, and put the engine around it; everything lies on the device, checked.

    Raises:
        UserError: the checkpoint to start from is broken or of another shape.
    Memory: the weights and, resuming, the optimizer's state.
    """
    config = run.config
    train = config.train
    device = run.device
    storage, compute, between_blocks = map(dtype_of, choice.precision)
    use(choice.kernels)
    device.set_exact_fp32(config.memory.mixed_precision == "no")
    offloaded = offloaded_store(choice, device, weights_folder(config.memory, config.run), run.group.size)
    model = _make_model(run, storage, offloaded)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = OPTIMIZERS[train.optimizer](weights)
    if run.base is not None and run.is_resumed:
        load_optimizer(run.base, optimizer)
    device.check_placement([*model.named_parameters(), *optimizer.state.items()])
    weight_store: WeightStore = offloaded or weight_store_for(storage, compute, (model.embedding, model.output_weight))
    scaling = LossScaling(**(run.state.loss_scaling or {})) if compute == torch.float16 else None
    blockwise = Blockwise(
        model,
        choice.saved_blocks,
        weight_store,
        LossSettings(choice.loss_chunk_bytes, train.label_smoothing),
        config.model.dropout_rate,
        config.task.objective(model, train, config.preference, config.lora),
        scaling,
        between_blocks_dtype=between_blocks,
        parts=compile_parts() if choice.compiled else None,
    )
    reducer = Reducer(run.group.hosts) if run.group.size > 1 else None
    update = OptimizerInBackward(optimizer, train.max_grad_norm, scaling, weight_store, reducer)
    return Engine(blockwise, update, device, choice, run.group.all_reduce_sum)


def _make_model(run: Beginning, storage: torch.dtype, offloaded: OffloadedWeightStore | None) -> T5:
    """The model, filled or loaded, its adapters on."""
    config = run.config
    device = run.device
    allocate = None
    filling = in_memory
    if offloaded is not None:
        allocate = offloaded.allocate
        filling = offloaded.filling
    if run.start is None:
        model = T5(config.model, "meta" if allocate else device.torch_device, storage)
        if allocate is not None:
            allocate(model)
        model.initialise(config.run.seed, filling)
    else:
        model = hf_format.load(
            run.start.base,
            dtype=storage,
            device=device.torch_device,
            expect=config.model,
            allocate=allocate,
            filling=filling,
            seed=config.run.seed,
            pieces=_pieces_of_new_tokens(run.start.base, run.tokenizer, config.data.extra_tokens),
            maps=config.lora.lora_rank > 0 and offloaded is None and device.name == "cpu",
        )
    base = None if run.start is None else run.start.base
    return choose_trained(model, config.lora, config.train.freeze, config.run.seed, run.base, base)


def _pieces_of_new_tokens(
    base_folder: Path, tokenizer: Tokenizer | None, extra_tokens: str | None
) -> dict[int, list[int]]:
    """Id -> ids in the tokenizer of the base, of each token that the run's tokenizer adds to it."""
    if extra_tokens is None or tokenizer is None or not has_tokenizer(base_folder):
        return {}
    base = Tokenizer.load(base_folder)
    new_ids = range(base.size, tokenizer.size)
    encoded = base.encode_batch([str(tokenizer.id_to_token(number)) for number in new_ids])
    return {number: ids[ids != base.unk_id].tolist() for number, ids in zip(new_ids, encoded, strict=True)}
