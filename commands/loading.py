"""Loading a trained model inside the budget, and answering with it.

It is held by the first rung of `memory.answers` that fits, computed in what this device multiplies fast. Where the folder
holds an adapter, its base is loaded and the adapter put on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import devices
from commands.answering import note
from data.text.templates import Template, template_of
from data.tokenizers.tokenizer import Tokenizer
from devices.base import Device, DtypeChoice, dtype_of, name_of, traits_of
from devices.kernels.calls import kernels, use
from devices.malloc import HeapTrimmer, tune_malloc
from devices.threads import use_threads
from engine.blockwise import Blockwise
from engine.objectives.labels import LabelObjective
from engine.weight_offload.store import offloaded_store
from engine.weights import weight_store_for
from language import join, say
from memory.answers import AnswerBatch, HeldModel, first_that_fits, largest, rungs, storage_dtypes
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
from model.shapes import weight_counts
from model.t5 import in_memory
from settings.declared import Config, T5ModelConfig
from settings.errors import DoesNotFit, OverBudget, UserError
from settings.fields import AUTO, counted
from training.evaluation.answers import AnswerBudget, AnswerWriter
from training.evaluation.prompt_parts import PromptParts
from training.processes.launch import num_processes
from training.setup.adapters import AdapterSet, attach
from training.setup.model_folders import ModelFolders
from units import MIB, format_size, typed_size

# Of the child that reads a file: Python and pyarrow take 30 MiB of it.
LEAST_READING_BYTES = 40 * MIB
MOST_READING_BYTES = 512 * MIB  # sound files take less
WAITING_BYTES = 3 * MIB  # of rows that were read, from which on no more are taken before these are done
WAITING_COPIES = 3  # as they come through a pipe, as they wait, and as they are written


@dataclass
class Trained:
    """A model ready to use, and what goes with it.

    Args:
        folder: of the adapter that is on, or else of the model. held: how the model is held. adapters: None: there are none.
        tree: of the answers that there are; None: any.
    """

    folder: Path
    blockwise: Blockwise
    held: HeldModel
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
        return self.held.answering(replace(batch, choices=choices))

    def reserve_reading(self, parts: Mapping[str, int]) -> int:
        """Bytes that the child that reads a file may hold: a quarter of what is left, within bounds. They count as taken from now on.

        Args:
            parts: what the least work beside it takes, the least of reading included: component -> bytes.
        """
        left = self.budget.limit() - sum(parts.values())
        if self.budget.is_on_device:
            left = self.budget.host_bytes - ProcessTree().usage().anon_bytes - LEAST_READING_BYTES
        more = max(0, min(left // 4, MOST_READING_BYTES - LEAST_READING_BYTES))
        if not self.budget.is_on_device:
            self.held = replace(self.held, base_bytes=self.held.base_bytes + more)
        return LEAST_READING_BYTES + more

    def rows_at_once(self, requested: int | str, batch: AnswerBatch, flag: str = "generate_batch_size") -> int:
        """How many prompts are answered together.

        Args:
            requested: a number is kept; auto: as many as fit, `batch.rows` at most. flag: by which it is asked for.
        Raises:
            DoesNotFit: not even one fits, or not so many as were asked for.
        """
        least = replace(batch, rows=1 if requested == AUTO else int(requested))
        if not self.answer_budget.fits(least):
            raise self.too_little(least, self.predict(least), flag)
        return self.answer_budget.rows(batch) if requested == AUTO else least.rows

    def too_little(self, batch: AnswerBatch, parts: Mapping[str, int], flag: str = "generate_batch_size") -> DoesNotFit:
        """What writing would need, and the changes that help.

        Args:
            parts: of what is needed: component -> bytes. flag: by which the rows are asked for.
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


def bytes_before(budget: Budget) -> int:
    """What is held, of the memory that the budget is about, before a model is loaded."""
    return 0 if budget.is_on_device else ProcessTree().usage().anon_bytes


def rows_to_measure(
    held: HeldModel, budget_bytes: int, requested: int | str, most: int, longest: tuple[int, int]
) -> int:
    """How many rows are read at once, and their loss measured.

    Args:
        requested: a number is kept; auto: as many of `most` as fit. longest: source and target tokens; without a target the
            encoder alone reads.
    Raises:
        DoesNotFit: not even one fits, or not so many as were asked for.
    """
    rows = largest(most, lambda rows: sum(held.measuring(rows, *longest).values()) <= budget_bytes)
    least = 1 if requested == AUTO else int(requested)
    parts = held.measuring(least, *longest)
    if sum(parts.values()) <= budget_bytes:
        return rows if requested == AUTO else least
    hints = [f"--eval_batch_size_per_gpu={least // 2}"] if least > 1 else []
    text = "{rows} of up to {source} and {target} tokens" if longest[1] else "{rows} of up to {source} tokens"
    what = say(text, rows=counted(least, "row"), source=longest[0], target=longest[1])
    raise does_not_hold(budget_bytes, what, parts, *hints, f"--max_seq_len={max(8, longest[0] // 2)}")


def does_not_hold(budget_bytes: int, what: str, parts: Mapping[str, int], *hints: str) -> DoesNotFit:
    """That a budget is too small for something: component -> bytes, and what would help beside a larger one."""
    sizes = [join(" ", [say(name), format_size(size)]) for name, size in parts.items() if size]
    more = say("--memory_budget={size} or more", size=typed_size(sum(parts.values())))
    return DoesNotFit(
        "--memory_budget = {size}, does not hold {what}: {parts}; try {remedies}",
        size=format_size(budget_bytes),
        what=what,
        parts=join(", ", sizes),
        remedies=join(", ", [more, *hints]),
    )


@contextmanager
def watched(monitor: Monitor, *changes: str) -> Iterator[None]:
    """Measure until the context ends.

    Args:
        changes: flags that would take less.
    Raises:
        OverBudget: everything is done, and took more than the budget.
    """
    with monitor:
        yield
    if monitor.peak_bytes > monitor.budget_bytes:
        raise OverBudget(
            "--memory_budget = {budget}, was exceeded: the peak was {peak}; {changes}",
            budget=format_size(monitor.budget_bytes),
            peak=format_size(monitor.peak_bytes),
            changes=join(", ", [say("raise it"), *changes]),
        )


@contextmanager
def converting(config: Config, shape: T5ModelConfig, stored: torch.dtype, beside: int) -> Iterator[None]:
    """Hold a model as it is stored, and something beside it, inside the budget until the context ends.

    Args:
        beside: bytes of what is made of the model at the same time.
    Raises:
        DoesNotFit: it is predicted to take more. OverBudget: it was done, and took more.
    """
    tune_malloc("fast")
    device = devices.pick("cpu")
    budget = measure_budget(config.memory.memory_budget, device)
    counts = weight_counts(shape)
    widened = 4 * max(counts["encoder"], counts["decoder"]) if stored != torch.float32 else 0
    held = HeldModel.of(shape, name_of(stored), "float32", bytes_before(budget))
    parts = held.peak({"weights in compute dtype": max(widened, beside)})
    if sum(parts.values()) > budget.limit():
        raise does_not_hold(budget.limit(), say("the model"), parts)
    with watched(Monitor(budget.host_bytes, device)):
        yield


def load_trained(
    config: Config,
    folders: ModelFolders,
    least: AnswerBatch | None = None,
    tree: AnswerTree | None = None,
    reads_files: bool = False,
) -> Trained:
    """Load a model for use.

    Args:
        least: that will be written with it; None: one answer to the longest prompt. tree: the answers that there are,
            measured with what the process holds already; None: any. reads_files: whether a child will read files beside it, see
            `Trained.reserve_reading`.
    Raises:
        UserError: the folder is not usable. DoesNotFit: the model is larger than the budget.
    """
    tune_malloc("fast")
    use_threads(config.run.num_threads)
    use(config.run.compiled_kernels is not False)
    device = devices.pick(config.run.device)
    for path in folders.all:
        refuse_damaged(path, "adapter" if path in folders.adapters else "model")
    shape = folders.shape
    tokenizer = Tokenizer.load(folders.tokenizer)
    if tokenizer.size > shape.vocab_size:
        raise UserError(
            "--model = {folder}, its tokenizer has {size} tokens and the model {vocab_size}: they do not match",
            folder=folders.folder,
            size=tokenizer.size,
            vocab_size=shape.vocab_size,
        )
    budget = measure_budget(config.memory.memory_budget, device)
    beside = sum(map(adapter_bytes, folders.adapters))
    if reads_files and not budget.is_on_device:
        beside += LEAST_READING_BYTES + WAITING_COPIES * WAITING_BYTES
    least = least or AnswerBatch.by(config.generate, 1, config.data.max_seq_len)
    stored = hf_format.stored_dtype(folders.base)
    compute = _products(config, device, stored)
    held = HeldModel.of(shape, name_of(stored), name_of(compute), bytes_before(budget) + beside)
    held = _hold(config, device, budget, held, least)
    tune_malloc(held.plan.malloc)
    storage = dtype_of(held.plan.storage)
    offloaded = offloaded_store(held.plan, device, weights_folder(config))
    t5 = hf_format.load(
        folders.base,
        storage,
        device.torch_device,
        expect=shape,
        allocate=offloaded.allocate if offloaded else None,
        filling=offloaded.filling if offloaded else in_memory,
    )
    adapters = attach(t5, list(folders.adapters), folders.base) if folders.adapters else None
    weight_store = offloaded or weight_store_for(storage, compute, (t5.embedding, t5.output_weight))
    objective = LabelObjective(t5.label_head) if t5.label_head is not None else None
    heap = HeapTrimmer("small" if device.is_separate_memory else "fast")
    blockwise = Blockwise(t5, 0, weight_store, LossSettings(), 0.0, objective, heap=heap)
    template = template_of(config.data, folders.tokenizer)
    return Trained(folders.learnt, blockwise, held, adapters, tokenizer, template, device, budget, tree)


def _products(config: Config, device: Device, stored: torch.dtype) -> torch.dtype:
    """The dtype of products: fp16 gives way to what the device multiplies fast, and to fp32 for int8."""
    requested = config.memory.mixed_precision
    is_narrow = stored in (torch.bfloat16, torch.int8)
    choice = device.choose_compute_dtype("no" if requested == AUTO and not is_narrow else requested)
    if stored == torch.int8 and choice.dtype == torch.float16:
        reason = say("fp32 products: those of int8 weights overflow in fp16")
        choice = DtypeChoice(torch.float32, reason, requested == AUTO)
    if not choice.as_requested:
        note(say("--mixed_precision = {asked}, {reason}", asked=requested, reason=choice.reason))
    return choice.dtype


def _hold(config: Config, device: Device, budget: Budget, model: HeldModel, least: AnswerBatch) -> HeldModel:
    """The first rung that fits; that the weights are rounded is said."""
    total = budget.limit()
    stored, compute = model.plan.storage, model.plan.compute
    requested = config.memory.mixed_precision
    if requested == AUTO and num_processes() > 1:
        requested = "no"  # Each process chooses for itself, so that none may round.
    dtypes = storage_dtypes(stored, compute, requested)
    scores = 0 if device.is_host else traits_of(device.torch_device).scores
    model = replace(model, plan=replace(model.plan, kernels=kernels() is not None, scores=scores))
    ways = list(rungs(model, dtypes, stored, weights_in_to_try(config, Machine(total, total))))
    held = first_that_fits(ways, total, lambda way: way.answering(least))
    if held is None:
        # The least way leaves the most memory to prompts; what the longest of them lacks is said once they are known.
        held = min(ways, key=lambda way: way.weight_bytes)
        if held.base_bytes + held.weight_bytes > total:
            raise DoesNotFit(
                "--memory_budget = {total_bytes}, does not hold the model's {size} of weights beside {base_bytes} of the "
                "program; raise it to {least} or more, or try --mixed_precision=bf16",
                total_bytes=format_size(total),
                size=format_size(held.weight_bytes),
                base_bytes=format_size(model.base_bytes),
                least=typed_size(sum(held.answering(least).values())),
            )
    if requested == AUTO and held.plan.storage not in (stored, compute):
        text = "weights rounded to {dtype}, as {budget} of memory does not hold them as they are; --mixed_precision=no forbids that"
        note(say(text, dtype=WORDS[held.plan.storage], budget=format_size(total)))
    return held
