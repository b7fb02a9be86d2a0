"""A trained model in memory, inside the budget, and the answers that it writes there.

It is held by the first rung of `memory.answers` that fits, and computed in what this device multiplies fast. Where the
folder holds an adapter, its base is loaded and the adapter put on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import devices
from data.text.templates import Template, template_of
from data.tokenizers.tokenizer import Tokenizer
from devices.base import Device, DtypeChoice, dtype_of, name_of, traits_of
from devices.kernels.calls import kernels, use
from devices.malloc import HeapTrimmer, tune_malloc
from devices.threads import use_threads
from engine.blockwise import Blockwise, Objective
from engine.objectives.embedding import EmbeddingObjective
from engine.objectives.labels import LabelObjective
from engine.weight_offload.store import offloaded_store
from engine.weights import weight_store_for
from memory.answers import AnswerBatch, HeldModel, bytes_before, does_not_hold, first_that_fits, rungs, storage_dtypes
from memory.budget import Budget, measure_budget
from memory.estimate.precision import WORDS
from memory.estimate.workload import Machine
from memory.monitor import Monitor
from memory.processes import ProcessTree
from memory.weights_in import weights_folder, weights_in_to_try
from model import hf_format
from model.decoding.answer_tree import AnswerTree
from model.formats.adapter_folder import adapter_bytes
from model.formats.checksums import refuse_damaged
from model.loss import LossSettings
from model.t5 import T5, in_memory
from settings.declared import Config, TrainConfig
from settings.errors import DoesNotFit, UserError
from settings.fields import AUTO, counted
from support.language import say
from support.units import MIB, format_size, typed_size
from training.evaluation.answers import AnswerBudget, AnswerWriter
from training.evaluation.prompt_parts import PromptParts
from training.processes.launch import num_processes, rank
from training.report.progress import Progress
from training.saved_model import SavedModel
from training.setup.adapters import AdapterSet, attach

# The child that reads a file holds this much at least, of which Python and pyarrow take 30 MiB.
LEAST_READING_BYTES = 40 * MIB
MOST_READING_BYTES = 512 * MIB  # Sound files take less.
WAITING_BYTES = 3 * MIB  # Where so many bytes of rows wait, no more are read before these are done.
WAITING_COPIES = 3  # Rows are there three times: in the pipe, as they wait, and as they are written.


@dataclass
class LoadedModel:
    """A model ready to use, and what goes with it.

    Args:
        folder: of the adapter that is on, or else of the model.
        held_model: how the weights are held, and what answers take.
        adapters: None: there are none.
        tree: of the answers that there are; None: any.
    """

    folder: Path
    blockwise: Blockwise
    held_model: HeldModel
    adapters: AdapterSet | None
    tokenizer: Tokenizer
    template: Template
    device: Device
    budget: Budget
    tree: AnswerTree | None = None
    monitor: Monitor = field(init=False)
    answer_budget: AnswerBudget = field(init=False)

    def __post_init__(self) -> None:
        self.monitor = Monitor(self.budget.host_bytes, self.device, device_budget_bytes=self.budget.device_bytes)
        self.answer_budget = AnswerBudget(self.predict, self.budget.limit(), self.monitor)

    def predict(self, batch: AnswerBatch) -> dict[str, int]:
        """What writing takes at its highest: component -> bytes."""
        choices = 0 if self.tree is None else self.tree.most_choices(batch.beams)
        return self.held_model.answering(replace(batch, choices=choices))

    def reserve_reading(self, parts: Mapping[str, int]) -> int:
        """Bytes that the child that reads a file may hold: a quarter of what is left, within bounds. They count as
        taken from now on.

        Args:
            parts: what the least work beside it takes, the least of reading included: component -> bytes.
        """
        free_bytes = self.budget.limit() - sum(parts.values())
        if self.budget.is_on_device:
            free_bytes = self.budget.host_bytes - ProcessTree().usage().anon_bytes - LEAST_READING_BYTES
        more = max(0, min(free_bytes // 4, MOST_READING_BYTES - LEAST_READING_BYTES))
        if not self.budget.is_on_device:
            self.held_model = replace(self.held_model, base_bytes=self.held_model.base_bytes + more)
        return LEAST_READING_BYTES + more

    def rows_at_once(self, requested: int | str, batch: AnswerBatch, flag: str = "generate_batch_size") -> int:
        """How many prompts are answered together.

        Args:
            requested: a number is kept; auto: as many as fit, `batch.rows` at most.
            flag: by which it is asked for.
        Raises:
            DoesNotFit: not even one fits, or not so many as were asked for.
        """
        least = replace(batch, rows=1 if requested == AUTO else int(requested))
        if not self.answer_budget.fits(least):
            raise self.too_little(least, self.predict(least), flag)
        return self.answer_budget.most_rows(batch) if requested == AUTO else least.rows

    def too_little(self, batch: AnswerBatch, parts: Mapping[str, int], flag: str = "generate_batch_size") -> DoesNotFit:
        """What writing would need, and the changes that help.

        Args:
            parts: of what is needed: component -> bytes.
            flag: by which the rows are asked for.
        """
        halves = {f"--{flag}": batch.rows, "--num_beams": batch.beams}
        hints = [f"{name}={number // 2}" for name, number in halves.items() if number > 1]
        hints.append(f"--max_seq_len={max(8, batch.source_tokens // 2)}")
        hints.append(f"--max_new_tokens={max(1, batch.new_tokens // 2)}")
        what = say(
            "{rows} of prompts of up to {source} tokens and answers of up to {target}",
            rows=counted(batch.rows, "row"),
            source=batch.source_tokens,
            target=batch.new_tokens,
        )
        return does_not_hold(self.budget.limit(), what, parts, *hints)

    def writer(self, config: Config) -> AnswerWriter:
        """Writes answers, as many at once as fit or were asked for; raises DoesNotFit as `rows_at_once`."""
        batch_size = config.answer.generate_batch_size
        return AnswerWriter(
            self.blockwise,
            config.generate,
            lambda batch: self.rows_at_once(batch_size, batch),
            config.run.seed,
            self.answer_budget,
            self.tree,
            PromptParts.asked(self.tokenizer, self.template, config.generate),
        )


def load_model(
    config: Config,
    saved: SavedModel,
    least: AnswerBatch | None = None,
    tree: AnswerTree | None = None,
    reads_files: bool = False,
) -> LoadedModel:
    """Load a model for use.

    Args:
        least: that will be written with it; None: one answer to the longest prompt.
        tree: the answers that there are, measured with what the process holds already; None: any.
        reads_files: whether a child will read files beside it, see `LoadedModel.reserve_reading`.
    Raises:
        UserError: the folder is not usable. DoesNotFit: the model is larger than the budget.
    """
    tune_malloc("fast")
    use_threads(config.run.num_threads)
    use(config.run.compiled_kernels is not False)
    device = devices.pick(config.run.device)
    for path in saved.folders:
        refuse_damaged(path, "adapter" if path in saved.adapters else "model")
    shape = saved.shape
    tokenizer = Tokenizer.load(saved.tokenizer)
    if tokenizer.size > shape.vocab_size:
        raise UserError(
            "--model = {folder}, its tokenizer has {size} tokens and the model {vocab_size}: they do not match",
            folder=saved.folder,
            size=tokenizer.size,
            vocab_size=shape.vocab_size,
        )
    budget = measure_budget(config.memory.memory_budget, device)
    base_bytes = bytes_before(budget) + sum(map(adapter_bytes, saved.adapters))
    if reads_files and not budget.is_on_device:
        base_bytes += LEAST_READING_BYTES + WAITING_COPIES * WAITING_BYTES
    stored_dtype = hf_format.stored_dtype(saved.base)
    compute = _compute_dtype(config.memory.mixed_precision, device, stored_dtype)
    model = HeldModel.of(shape, name_of(stored_dtype), name_of(compute), base_bytes)
    folder = weights_folder(config.memory, config.run)
    least = least or AnswerBatch.by(config.generate, 1, config.data.max_seq_len)
    weights_in = weights_in_to_try(config.memory.weights_in, folder, Machine(budget.limit(), budget.limit()))
    model = _hold(config.memory.mixed_precision, weights_in, device, budget, model, least)
    tune_malloc(model.plan.malloc)
    storage = dtype_of(model.plan.storage)
    offloaded = offloaded_store(model.plan, device, folder)
    allocate = None
    filling = in_memory
    if offloaded is not None:
        allocate = offloaded.allocate
        filling = offloaded.filling
    t5 = hf_format.load(saved.base, storage, device.torch_device, expect=shape, allocate=allocate, filling=filling)
    adapters = attach(t5, list(saved.adapters), saved.base) if saved.adapters else None
    weight_store = offloaded or weight_store_for(storage, compute, (t5.embedding, t5.output_weight))
    objective = objective_of(t5, config.train)
    heap = HeapTrimmer("small" if device.is_separate_memory else "fast")
    blockwise = Blockwise(t5, 0, weight_store, LossSettings(), 0.0, objective, heap=heap)
    template = template_of(config.data, saved.tokenizer)
    return LoadedModel(saved.top, blockwise, model, adapters, tokenizer, template, device, budget, tree)


def objective_of(model: T5, train: TrainConfig) -> Objective | None:
    """What the loss of a trained model's head is; None: that of text."""
    if model.label_head is not None:
        return LabelObjective(model.label_head)
    if model.embedding_head is not None:
        return EmbeddingObjective.of(model, train)
    return None


def note(text: str) -> None:
    """Say something beside the answers, which a script may read from standard output."""
    Progress(1, rank() == 0, stream=sys.stderr).note(text)


def _compute_dtype(requested: str, device: Device, stored_dtype: torch.dtype) -> torch.dtype:
    """The dtype of products: fp16 gives way to what the device multiplies fast, and to fp32 for int8."""
    is_narrow = stored_dtype in (torch.bfloat16, torch.int8)
    choice = device.choose_compute_dtype("no" if requested == AUTO and not is_narrow else requested)
    if stored_dtype == torch.int8 and choice.dtype == torch.float16:
        reason = say("fp32 products: those of int8 weights overflow in fp16")
        choice = DtypeChoice(torch.float32, reason, requested == AUTO)
    if not choice.as_requested:
        note(say("--mixed_precision = {asked}, {reason}", asked=requested, reason=choice.reason))
    return choice.dtype


def _hold(
    requested: str, weights_in: list[str], device: Device, budget: Budget, model: HeldModel, least: AnswerBatch
) -> HeldModel:
    """The first rung that fits; that the weights are rounded is said."""
    total = budget.limit()
    as_stored = model.plan.storage
    compute = model.plan.compute
    if requested == AUTO and num_processes() > 1:
        requested = "no"  # Each process chooses for itself, so that none may round.
    scores = 0 if device.is_host else traits_of(device.torch_device).score_elements
    model = replace(model, plan=replace(model.plan, kernels=kernels() is not None, scores=scores))
    candidates = list(rungs(model, storage_dtypes(as_stored, compute, requested), as_stored, weights_in))
    chosen = first_that_fits(candidates, total, lambda candidate: candidate.answering(least))
    if chosen is None:
        # The smallest leaves the most memory to prompts; what the longest of them lacks is said once they are known.
        chosen = min(candidates, key=lambda candidate: candidate.weight_bytes)
        if chosen.base_bytes + chosen.weight_bytes > total:
            raise DoesNotFit(
                "--memory_budget = {total_bytes}, is too small for the model's {size} of weights and "
                "{base_bytes} of the program; raise it to {least} or more, or try --mixed_precision=bf16",
                total_bytes=format_size(total),
                size=format_size(chosen.weight_bytes),
                base_bytes=format_size(model.base_bytes),
                least=typed_size(sum(chosen.answering(least).values())),
            )
    if requested == AUTO and chosen.plan.storage not in (as_stored, compute):
        text = (
            "weights rounded to {dtype}, because {budget} of memory is too small for them as they are "
            "stored; --mixed_precision=no forbids that"
        )
        note(say(text, dtype=WORDS[chosen.plan.storage], budget=format_size(total)))
    return chosen
