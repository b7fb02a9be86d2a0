"""`quantize`: a folder with int8 weights, measured beside the original.

The folder holds one byte a weight (`model.int8.safetensors`); `generate`, `evaluate`, `chat` and adapters load it. Loss
is measured on validation rows: those of `--validation_file`, those held out by the model's run, or of the built-in
sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

import devices
from commands.convert import next_command, probe_logits, relative_difference
from commands.evaluate import EVALUATION_BATCH, evaluation_rows
from commands.merge import converting, open_merged
from commands.new_folder import copy_companions, holding_output, new_folder
from data.batches.collate import Batch
from data.shards.store import VALIDATION
from devices.base import name_of
from devices.malloc import HeapTrimmer
from devices.threads import use_threads
from engine.blockwise import Blockwise
from engine.weights import weight_store_for
from memory.answers import HeldModel, bytes_before, rows_to_measure
from memory.budget import measure_budget
from model import hf_format
from model.loss import LossSettings
from model.quantization import quantize_model
from model.t5 import T5
from settings.declared import Config, T5ModelConfig, TrainConfig
from settings.fields import counted
from settings.tasks import task_named
from support.language import say
from support.units import format_size
from tasks.base import Scores
from training.evaluation.losses import evaluate
from training.loaded_model import objective_of
from training.processes.group import Group
from training.report.progress import Progress
from training.saved_model import find_model
from training.setup.adapters import note_origin


@dataclass(frozen=True)
class MeasuredModel:
    """One of the two models.

    Args:
        loss: mean over the labels of the validation rows. logits: (rows, steps, V) for fixed ids. size: bytes of its
            weights.
    """

    loss: float
    logits: torch.Tensor
    size: int


@holding_output
def quantize(config: Config) -> tuple[MeasuredModel, MeasuredModel]:
    """Write `--model`, an adapter merged in, with int8 weights as `--output`, and tell how near both are.

    Returns:
        the model as it was and in int8, on the same rows.
    Raises:
        UserError: the model or the data are not usable, or the folder cannot be written. DoesNotFit: the budget does
            not hold the measuring.
    Memory: the model as it is stored, one block in fp32 while it is measured.
    """
    use_threads(config.run.num_threads)
    folders = find_model(config)
    settings, prepared, loader = evaluation_rows(config, folders)
    shape = folders.shape
    dtype = hf_format.stored_dtype(folders.base)
    requested = settings.train.eval_batch_size_per_gpu
    budget = measure_budget(settings.memory.memory_budget, devices.pick("cpu"))
    held_model = HeldModel.of(shape, name_of(dtype), "float32", bytes_before(budget))
    task = task_named(prepared.objective)
    scores_bytes = task.scores_bytes(prepared.counts[f"{VALIDATION}_texts"], shape)
    held_model = replace(held_model, base_bytes=held_model.base_bytes + scores_bytes)
    rows_at_once = rows_to_measure(held_model, budget.limit(), requested, EVALUATION_BATCH, loader.longest)

    def measure(model: T5) -> MeasuredModel:
        batches = loader.evaluation_batches(settings.train.eval_rows, rows_at_once)
        return _measure(model, settings.train, batches, task.new_scores(prepared.labels))

    with converting(settings.memory.memory_budget, shape, dtype, 0):
        model = open_merged(folders)
        before = measure(model)
        with new_folder(config.answer.output, config.run.overwrite, *folders.folders) as folder:
            quantize_model(model)
            hf_format.save(model, folder)
            if not folders.adapters:
                note_origin(folder, folders.base)
            copy_companions(folders, folder)
            del model
            after = measure(hf_format.load(folder, torch.int8))
        rows = min(settings.train.eval_rows, loader.num_rows)
        _show(
            before,
            after,
            say("{rows} ({objective})", rows=counted(rows, "row"), objective=prepared.objective),
            str(config.answer.output),
            shape,
        )
        return before, after


def _measure(model: T5, train: TrainConfig, batches: Iterable[Batch], scores: Scores) -> MeasuredModel:
    """Loss and logits, computed in fp32 on the CPU, whatever the dtype of the weights."""
    weight_store = weight_store_for(model.embedding.dtype, torch.float32, (model.embedding, model.output_weight))
    objective = objective_of(model, train)
    blockwise = Blockwise(model, 0, weight_store, LossSettings(), 0.0, objective, heap=HeapTrimmer("fast"))
    result = evaluate(blockwise, batches, Group(), torch.device("cpu"), scores)
    return MeasuredModel(result.loss, probe_logits(model), sum(weight.nbytes for weight in model.parameters()))


def _show(before: MeasuredModel, after: MeasuredModel, rows: str, output: str, shape: T5ModelConfig) -> None:
    largest = float((after.logits - before.logits).abs().max())
    share = relative_difference(after.logits, before.logits)
    differ = say("differ by at most {largest}, {share} of their norm", largest=f"{largest:.3f}", share=f"{share:.1e}")
    losses = {
        "before": f"{before.loss:.4f}",
        "after": f"{after.loss:.4f}",
        "change": f"{after.loss - before.loss:+.4f}",
    }
    Progress(1).table(
        say("int8 weights"),
        [
            (say("folder"), output),
            (say("weights"), f"{format_size(before.size)} -> {format_size(after.size)}"),
            (say("loss"), say("{before} -> {after} ({change}) on {rows}", rows=rows, **losses)),
            (say("logits"), differ),
            (say("next"), next_command(shape, output)),
        ],
    )
