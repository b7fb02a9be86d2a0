"""`merge`: adapters added into their matrices; logits are compared.

The sum is formed in fp32 and stored as the base is; a bf16 base rounds it, which the logits show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import devices
from commands.convert import DTYPES, next_command, probe_logits, relative_difference
from commands.new_folder import copy_companions, holding_output, new_folder, refuse_not_finite
from devices.base import name_of
from devices.malloc import tune_malloc
from memory.answers import HeldModel, bytes_before, does_not_hold
from memory.budget import measure_budget
from memory.monitor import Monitor, watched
from model import hf_format
from model.formats.checksums import refuse_damaged
from model.formats.pickle_files import DTYPE_NAMES
from model.formats.shape_file import read_config
from model.formats.tensor_files import TensorFolder
from model.lora.adapter import merge as merge_adapters
from model.quantization import is_int8
from model.shapes import inner_width, weight_counts
from model.t5 import T5
from settings.declared import Config, T5ModelConfig
from settings.errors import UserError
from support.language import say
from support.storage import write_text
from training.report.progress import Progress
from training.report.run_files import SETTINGS_FILE
from training.saved_model import SavedModel, find_model
from training.setup.adapters import attach


def open_adapted(folders: SavedModel) -> T5:
    """Load a model with the first of its adapters on, its weights as they are stored, foreign kinds of them in fp32.

    Raises:
        UserError: the folders do not go together, or the weights are int8, which can be neither merged nor written
            otherwise.
    Memory: the model, which stays in its file where no adapter changes it.
    """
    for folder in folders.folders:
        refuse_damaged(folder, "adapter" if folder in folders.adapters else "model")
    dtype = hf_format.stored_dtype(folders.base)
    if dtype.is_floating_point and dtype not in DTYPES.values():  # float64 and float8 are not written again.
        dtype = torch.float32
    model = hf_format.load(folders.base, dtype=dtype, expect=folders.shape, maps=not folders.adapters)
    if is_int8(model.embedding):
        raise UserError("--model = {home}, has int8 weights; give the model that it was made from", home=folders.base)
    if folders.adapters:
        attach(model, folders.adapters[:1], folders.base)
    return model


def stays_in_file(folders: SavedModel) -> bool:
    """Whether all matrices of a model stay in their file, mapped, when it is opened: no adapter changes them, and they
    have one dtype, which is computed with.
    """
    return not folders.adapters and TensorFolder(folders.base).matrix_dtype() in map(DTYPE_NAMES.get, DTYPES.values())


def open_merged(folders: SavedModel) -> T5:
    """Load a model with its adapter merged in; raises as `open_adapted`, and where weights are not finite."""
    model = open_adapted(folders)
    merge_adapters(model)
    refuse_not_finite(model, *folders.folders)
    return model


@contextmanager
def converting(
    memory_budget: int | str,
    shape: T5ModelConfig,
    dtype: torch.dtype,
    beside: int,
    is_mapped: bool = False,
    hints: Sequence[str] = (),
) -> Iterator[None]:
    """Hold a model in its dtype on the disk, and something beside it, inside the budget until the context ends.

    Args:
        beside: bytes of what is made of the model at the same time.
        is_mapped: whether its weights stay in their file, where they take no memory of their own.
        hints: flags that would make it fit.
    Raises:
        DoesNotFit: it is predicted to take more. OverBudget: it was done, and took more.
    """
    tune_malloc("fast")
    device = devices.pick("cpu")
    budget = measure_budget(memory_budget, device)
    counts = weight_counts(shape)
    widened = 0 if dtype == torch.float32 else 4 * max(counts["encoder"], counts["decoder"])
    model = HeldModel.of(shape, name_of(dtype), "float32", bytes_before(budget))
    parts = model.peak({"what is made of it": beside} if beside > widened else {"weights in compute dtype": widened})
    if is_mapped:
        parts["weights"] = 0
    if sum(parts.values()) > budget.limit():
        raise does_not_hold(budget.limit(), say("the model"), parts, *hints)
    with watched(Monitor(budget.host_bytes, device)):
        yield


@holding_output
def merge(config: Config) -> float:
    """Write `--adapter` and its base as one plain Hugging Face folder.

    Returns:
        the largest distance of a logit before and after, as a share of the logits' norm.
    Raises:
        UserError: no adapter, one for another base, a base in int8, or a folder that cannot be written.
    Memory: the model, and one matrix in fp32 twice.
    """
    folders = find_model(config)
    if len(folders.adapters) != 1:
        adapter = config.checkpoint.adapter or "none"
        raise UserError("--adapter = {named}, merging takes one adapter; name its folder", named=adapter)
    shape = read_config(folders.base)
    matrix = shape.d_model * max(shape.d_ff, inner_width(shape))
    with converting(config.memory.memory_budget, shape, hf_format.stored_dtype(folders.base), 2 * 4 * matrix):
        model = open_adapted(folders)
        before = probe_logits(model)
        merge_adapters(model)
        refuse_not_finite(model, *folders.folders)
        difference = relative_difference(probe_logits(model), before)
        with new_folder(config.answer.output, config.run.overwrite, *folders.folders) as folder:
            hf_format.save(model, folder)
            copy_companions(folders, folder)
            if folders.run_settings:  # columns and lengths, by which `evaluate` reads rows
                write_text(
                    folder / SETTINGS_FILE, json.dumps(folders.run_settings, indent=1, ensure_ascii=False) + "\n"
                )
        output = config.answer.output
        rows = [
            (say("folder"), str(output)),
            (say("base model"), str(folders.base)),
            (say("weights"), name_of(model.embedding.dtype)),
            (say("logits"), say("differ by {share} of their norm", share=f"{difference:.1e}")),
            (say("next"), next_command(model.config, output)),
        ]
        Progress(1).table(say("merged {adapter}", adapter=folders.top), rows)
        return difference
