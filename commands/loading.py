"""Loading a trained model inside the budget.

Its weights are held in the dtype of the folder, computed in what this device multiplies fast. Where a chip multiplies
only fp32 fast, bf16 weights would have to be widened each time a block runs, for every token: they are loaded as
fp32 where that fits. Weights in int8 stay so. Where the folder holds an adapter, its base is loaded and the adapter put on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import devices
from data.text.templates import Template, template_of
from data.tokenizers.tokenizer import Tokenizer
from devices.base import Device, DtypeChoice, name_of
from devices.kernels.calls import kernels, use
from devices.malloc import HeapTrimmer, tune_malloc
from devices.threads import use_threads
from engine.blockwise import Blockwise, Objective
from engine.objectives.labels import LabelObjective
from engine.weight_offload.store import offloaded_store
from engine.weights import weight_store_for
from language import join, say
from memory.budget import Budget, measure_budget
from memory.estimate.generation import (
    LIBRARIES_BYTES,
    MARGIN,
    AnswerBudget,
    Weights,
    Writing,
    predict_generation,
    predict_loss,
)
from memory.estimate.weight_offload import away_bytes, slots_bytes
from memory.estimate.workload import DEVICE, FILE, ExecutionPlan, Machine, Workload
from memory.monitor import Monitor
from memory.processes import ProcessTree
from memory.weights_in import weights_folder, weights_in_to_try
from model import hf_format
from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer
from model.formats.adapter_folder import adapter_bytes
from model.formats.answering import DRAWN, GENERATION_FILE, RANKED, SEARCH, answers_by, remarks
from model.formats.checksums import refuse_damaged
from model.loss import LossSettings
from model.shapes import weight_counts
from settings.consistency import ANSWER_RULES, broken, ranking_problems
from settings.declared import Config, T5ModelConfig
from settings.errors import DoesNotFit, OverBudget, UserError, refuse
from settings.fields import AUTO, counted, near_path
from settings.needs import without_effect
from training.checkpoints.runs import model_folder, runs_newest_first
from training.evaluation.answers import AnswerWriter
from training.evaluation.prompt_parts import PromptParts
from training.processes.launch import num_processes, rank
from training.report.progress import Progress
from training.setup.adapters import AdapterSet, attach
from training.setup.model_folders import ModelFolders, base_of
from units import MIB, format_size, typed_size

# Of the budget, that one answer of the longest may take before malloc is told to keep the heap small: gaps between tensors of
# prompts of many lengths grow it by a tenth over some dozens of them
ROOMY_SHARE = 0.8
# For the child that reads a file and what waits between it and the model: at least this, of which most is Python and pyarrow
LEAST_READING_BYTES = 64 * MIB
MOST_READING_BYTES = 512 * MIB  # sound files take less
WAITING_BYTES = 4 * MIB  # of rows that were read, from which on no more are taken before these are done
WAITING_COPIES = 3  # as they come through a pipe, as they wait, and as they are written


@dataclass
class Room:
    """What may be taken, and by whom it is taken before the model is there. Bytes."""

    budget: Budget
    total_bytes: int
    base_bytes: int

    @classmethod
    def measure(cls, config: Config, device: Device) -> Room:
        """The room on the device if it has memory of its own, else on the host."""
        budget = measure_budget(config.memory.memory_budget, device)
        return cls(budget, budget.limit(), 0 if budget.is_on_device else ProcessTree().usage().anon_bytes)

    def rows_of_loss(
        self, model: T5ModelConfig, weights: Weights, asked: int | str, longest: tuple[int, int], usual: int
    ) -> int:
        """How many rows are read at once, and their loss measured.

        Args:
            asked: a number is kept; auto: as many of `usual` as fit. longest: source and target tokens.
        Raises:
            DoesNotFit: not even one fits, or not so many as were asked for.
        """
        rows = usual if asked == AUTO else int(asked)
        while True:
            parts = predict_loss(model, weights, rows, longest, self.base_bytes)
            if sum(parts.values()) <= self.total_bytes:
                return rows
            if asked != AUTO or rows == 1:
                break
            rows //= 2
        hints = [f"--eval_batch_size_per_gpu={rows // 2}"] if rows > 1 else []
        told = "{rows} of up to {source} and {target} tokens" if longest[1] else "{rows} of up to {source} tokens"
        what = say(told, rows=counted(rows, "row"), source=longest[0], target=longest[1])
        raise self.does_not_hold(what, parts, *hints, f"--max_seq_len={max(8, longest[0] // 2)}")

    def does_not_hold(self, what: str, parts: Mapping[str, int], *hints: str) -> DoesNotFit:
        """That it needs more: component -> bytes, and what would help beside a larger budget."""
        shown = join(", ", [join(" ", [say(name), format_size(size)]) for name, size in parts.items() if size])
        more = say("--memory_budget={size} or more", size=typed_size(sum(parts.values())))
        return DoesNotFit(
            say(
                "--memory_budget = {size}, does not hold {what}: {parts}; try {remedies}",
                size=format_size(self.total_bytes),
                what=what,
                parts=shown,
                remedies=join(", ", [more, *hints]),
            )
        )


class Loaded(NamedTuple):
    """A model in memory; `folder`: of the adapter that is on, or else of the model."""

    folder: Path
    blockwise: Blockwise
    weights: Weights
    adapters: AdapterSet | None


@dataclass
class Trained:
    """A model ready to use, and what goes with it."""

    loaded: Loaded
    tokenizer: Tokenizer
    template: Template
    device: Device
    room: Room
    tree: AnswerTree | None = None  # of the answers that there are; None: any
    monitor: Monitor = field(init=False)
    kept: AnswerBudget = field(init=False)

    def __post_init__(self) -> None:
        budget = self.room.budget
        self.monitor = Monitor(budget.host_bytes, self.device, device_budget_bytes=budget.device_bytes)
        self.kept = AnswerBudget(
            lambda writing: sum(self.predict(writing).values()), self.room.total_bytes, self.monitor
        )

    @property
    def blockwise(self) -> Blockwise:
        """The model with the weights it computes with."""
        return self.loaded.blockwise

    @property
    def shape(self) -> T5ModelConfig:
        """The model's shape."""
        return self.blockwise.model.config

    def predict(self, writing: Writing) -> dict[str, int]:
        """What writing takes at its highest: component -> bytes."""
        writing = writing if self.tree is None else replace(writing, choices=self.tree.most_choices(writing.beams))
        return predict_generation(self.shape, self.loaded.weights, writing, self.room.base_bytes)

    def reserve_reading(self, parts: Mapping[str, int]) -> int:
        """Bytes that the child that reads a file may hold: a quarter of what is left, within bounds. They count as taken from now on.

        Args:
            parts: what the least work beside it takes, the least of reading included: component -> bytes.
        """
        budget = self.room.budget
        left = self.room.total_bytes - sum(parts.values())
        if budget.is_on_device:
            left = budget.host_bytes - ProcessTree().usage().anon_bytes - LEAST_READING_BYTES
        more = max(0, min(left // 4, MOST_READING_BYTES - LEAST_READING_BYTES))
        if not budget.is_on_device:
            self.room.base_bytes += more
        return LEAST_READING_BYTES + more

    def rows_at_once(self, asked: int | str, writing: Writing, flag: str = "generate_batch_size") -> int:
        """How many prompts are answered together.

        Args:
            asked: a number is kept; auto: as many as fit, `writing.rows` at most. flag: by which it is asked for.
        Raises:
            DoesNotFit: not even one fits, or not so many as were asked for.
        """
        if asked == AUTO:
            least, rows = replace(writing, rows=1), self.kept.most(writing)
        else:
            least = replace(writing, rows=int(asked))
            rows = least.rows if self.kept.fits(least) else 0
        if not rows:
            raise self.too_little(least, flag)
        return rows

    def too_little(
        self, writing: Writing, flag: str = "generate_batch_size", parts: Mapping[str, int] | None = None
    ) -> DoesNotFit:
        """What writing would need, and the changes that help.

        Args:
            flag: by which the rows are asked for. parts: of what is needed; None: as `predict` says.
        """
        hints = [f"--{flag}={writing.rows // 2}"] if writing.rows > 1 else []
        hints += [f"--num_beams={writing.beams // 2}"] if writing.beams > 1 else []
        hints += [
            f"--max_seq_len={max(8, writing.source_tokens // 2)}",
            f"--max_new_tokens={max(1, writing.new_tokens // 2)}",
        ]
        told = "{rows} of prompts of up to {source} tokens and answers of up to {target}"
        what = say(told, rows=counted(writing.rows, "row"), source=writing.source_tokens, target=writing.new_tokens)
        return self.room.does_not_hold(what, self.predict(writing) if parts is None else parts, *hints)

    def answer(self, inputs: list[list[int]], config: Config) -> list[list[int]]:
        """Token ids of the answers to prompts, as many at once as fit or were asked for.

        Raises:
            DoesNotFit: as `rows_at_once`.
        """
        return self._writer(config).answers(inputs)

    def ranked_answers(self, inputs: list[list[int]], config: Config) -> list[list[list[int]]]:
        """Token ids of the `num_answers` best to each prompt, or of the one of `answer`."""
        if config.answer.num_answers == 1:
            return [[tokens] for tokens in self.answer(inputs, config)]
        return [[answer.tokens for answer in best] for best in self.best_answers(inputs, config)]

    def best_answers(self, inputs: list[list[int]], config: Config) -> list[list[ScoredAnswer]]:
        """The `num_answers` best to each prompt, or as many as there are; otherwise as `answer`."""
        return [best[: config.answer.num_answers] for best in self._writer(config).best(inputs)]

    def _writer(self, config: Config) -> AnswerWriter:
        batch_size = config.answer.generate_batch_size
        return AnswerWriter(
            self.blockwise,
            config.generate,
            lambda writing: self.rows_at_once(batch_size, writing),
            config.run.seed,
            self.kept,
            self.tree,
            PromptParts.asked(self.tokenizer, self.template, config.generate),
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
            say(
                "--memory_budget = {budget}, was exceeded: the peak was {peak}; {changes}",
                budget=format_size(monitor.budget_bytes), peak=format_size(monitor.peak_bytes),
                changes=join(", ", [say("raise it"), *changes]),
            )
        )  # fmt: skip


@contextmanager
def converting(config: Config, shape: T5ModelConfig, stored: torch.dtype, beside: int) -> Iterator[None]:
    """Hold a model as it is stored, and something beside it, inside the budget until the context ends.

    Args:
        beside: bytes of what is made of the model at the same time.
    Raises:
        DoesNotFit: it is predicted to take more. OverBudget: it was done, and took more.
    """
    device = devices.pick("cpu")
    tune_malloc("fast")
    room, counts = Room.measure(config, device), weight_counts(shape)
    block = 4 * max(counts["encoder"], counts["decoder"]) if stored != torch.float32 else 0
    parts = {
        "base": room.base_bytes, "libraries": LIBRARIES_BYTES, "weights": counts["total"] * stored.itemsize,
        "weights in compute dtype": max(block, beside),
    }  # fmt: skip
    parts["allocator slack"] = int(MARGIN * sum(parts.values()))
    if sum(parts.values()) > room.total_bytes:
        raise room.does_not_hold(say("the model"), parts)
    with watched(Monitor(room.budget.host_bytes, device)):
        yield


def writing_of(config: Config, rows: int, longest: int | None = None) -> Writing:
    """What `config` asks to be written, for prompts of at most `longest` tokens, by default max_seq_len."""
    how = config.generate
    source = min(longest or config.data.max_seq_len, config.data.max_seq_len)
    return Writing.by(how, rows, source)


def answering(config: Config, model: ModelFolders, searches: bool = True, ranks: bool = False) -> Config:
    """The settings with what a model's folder says of how it answers, where nobody has said so for now; it is told.

    Args:
        model: what its adapter says goes before. searches: whether there is a beam search here. ranks: whether answers are
            scored by rank.
    Raises:
        UserError: the folder asks for what cannot be done.
    """
    given = {name for name in vars(config.generate) if config.given(name)}
    if config.generate.num_beams > 1 or ("temperature" in given and config.generate.temperature == 0.0):
        given |= set(DRAWN)
    if config.generate.temperature > 0.0 or not searches:
        given |= set(SEARCH)
    if config.answer.num_answers > 1:
        given.add("split_prompts")  # joins one answer of each part
    own, problems, notes = dict[str, Any](), list[str](), list[str]()
    for place in dict.fromkeys((model.base, model.learnt)):
        found, wrong = answers_by(place, given)
        own, problems = own | found, problems + wrong
        notes += [say("{keys}: unknown, ignored", keys=keys) for keys in remarks(place)]
    several = own.pop(RANKED, 1)
    own = {name: value for name, value in own.items() if value != getattr(config.generate, name)}
    if own.get("num_beams", config.generate.num_beams) == 1:
        own = {name: value for name, value in own.items() if name not in SEARCH}
    if ranks and not config.given(RANKED) and 1 < several <= own.get("num_beams", config.generate.num_beams):
        own[RANKED] = several
    config = config.changed(**own)
    for problem in broken(ANSWER_RULES, config) if not problems else []:
        problems.append(say("{file}: {problem}", file=GENERATION_FILE, problem=problem))
    refuse(problems)
    refuse([*ranking_problems(config), *(without_effect(config, ("num_beams", "temperature")) if searches else [])])
    if own:
        settings = ", ".join(f"--{name}={value}" for name, value in own.items())
        text = "generating with {settings} from the model's {file}; flags override it"
        notes.append(say(text, settings=settings, file=GENERATION_FILE))
    for note in notes:  # beside the answers, which a script may read from standard output
        Progress(1, rank() == 0, stream=sys.stderr).note(note)
    return config


def with_saved(config: Config, model: ModelFolders, *names: str) -> Config:
    """The settings, of which these are as in the run that trained the model, unless a flag or a file says otherwise.

    Raises:
        UserError: the file of that run has a value that the setting cannot have.
    """
    saved = model.run_settings
    return config.changed(**{name: saved[name] for name in names if name in saved and not config.given(name)})


def find_model(config: Config) -> ModelFolders:
    """The model that `--model` names, with its adapters; auto: the base of the adapter that is named, else the newest run's model.

    Raises:
        UserError: it is not there.
    """
    named, adapter = config.checkpoint.model, config.checkpoint.adapter
    if named == AUTO and adapter is not None:
        return ModelFolders.of(base_of(ModelFolders.of(Path(), adapter).learnt), adapter)
    if named == AUTO:
        folders = [run.folder for run in runs_newest_first(config.run.output_dir) if run.model_folder is not None]
        if not folders:
            raise UserError(
                "--model = auto, there is no trained model in {output_dir}; give a folder, or train first",
                output_dir=config.run.output_dir,
            )
        named = str(folders[0])
    folder = model_folder(named) or Path(named)
    if folder.is_file():
        raise UserError(
            "--model = {folder}, is a file; give the folder with config.json, model.safetensors and tokenizer.json",
            folder=named,
        )
    if not folder.is_dir():
        missing = say(
            "--model = {folder}, no such folder; give one with config.json, model.safetensors and tokenizer.json",
            folder=named,
        )
        raise UserError(missing + near_path(folder))
    return ModelFolders.of(folder, adapter)


def check_one_process(command: str) -> None:
    """Refuse to do the same work several times over.

    Raises:
        UserError: a launcher has started several processes.
    """
    if num_processes() > 1:
        raise UserError(
            say(
                "{command}, works with one process; start it by python, without accelerate launch or torchrun",
                command=command,
            )
        )


def refuse_several_adapters(model: ModelFolders) -> None:
    """Refuse a model with adapters of which one alone can be on."""
    if len(model.adapters) > 1:
        names = ",".join(map(str, model.adapters))
        raise UserError(
            "--adapter = {names}, only one can be on here; give one (chat changes between several)", names=names
        )


def find_answering(
    config: Config,
    searches: bool = True,
    several: bool = False,
    writes: bool = False,
    ranks: bool = False,
) -> tuple[Config, ModelFolders]:
    """The settings with what the model that is named says of how it answers, and the model.

    Args:
        searches: whether there is a beam search here. several: whether there is somebody who changes between adapters. writes:
            whether text has to be written.
    Raises:
        UserError: there is none, it writes no text, it asks for what cannot be done, or several adapters, where only one can be on.
    """
    model = find_model(config)
    shape = model.shape
    if not several:
        refuse_several_adapters(model)
    if shape.is_text:
        return answering(config, model, searches, ranks), model
    if writes:
        raise UserError(
            say(
                "--model = {folder}, is an encoder (--head={head}) and writes no text; give a model with a decoder, or use evaluate or embed",
                folder=model.folder,
                head=shape.head,
            )
        )
    return config, model


def load_trained(
    config: Config,
    folders: ModelFolders,
    writing: Writing,
    tree: AnswerTree | None = None,
    reads_files: bool = False,
) -> Trained:
    """Load a model for use.

    Args:
        writing: the least that will be written with it. tree: the answers that there are,
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
    room = Room.measure(config, device)
    beside = sum(map(adapter_bytes, folders.adapters))
    if reads_files and not room.budget.is_on_device:
        beside += LEAST_READING_BYTES + WAITING_COPIES * WAITING_BYTES
    room = replace(room, base_bytes=room.base_bytes + beside)

    def total_bytes(weights: Weights) -> int:
        return sum(predict_generation(shape, weights, writing, room.base_bytes).values())

    fits_wide = total_bytes(_weights(shape, torch.float32, torch.float32)) <= room.total_bytes
    storage, compute = _choose_dtypes(config, device, folders.base, fits_wide)
    if not compute.as_requested:  # On standard error, as a script may read the answers.
        Progress(1, rank() == 0, stream=sys.stderr).note(
            say("--mixed_precision = {asked}, {reason}", asked=config.memory.mixed_precision, reason=compute.reason)
        )
    weights, plan = _fitting(config, shape, (storage, compute.dtype), total_bytes, room)
    roomy = replace(weights, small_heap=False)
    if total_bytes(roomy) <= ROOMY_SHARE * room.total_bytes:
        weights = roomy
    else:
        tune_malloc("small")
    offloaded = offloaded_store(plan, device, weights_folder(config))
    if offloaded is None:
        t5 = hf_format.load(folders.base, storage, device.torch_device, expect=shape)
    else:
        t5 = hf_format.load(
            folders.base,
            storage,
            device.torch_device,
            expect=shape,
            allocate=offloaded.allocate,
            filling=offloaded.filling,
        )
    adapter_set = attach(t5, list(folders.adapters), folders.base) if folders.adapters else None
    weight_store = offloaded or weight_store_for(storage, compute.dtype, (t5.embedding, t5.output_weight))
    objective: Objective | None = None
    if t5.label_head is not None:
        objective = LabelObjective(t5.label_head)
    heap = HeapTrimmer("small" if device.is_separate_memory else "fast")
    blockwise = Blockwise(t5, 0, weight_store, LossSettings(), 0.0, objective, heap=heap)
    loaded = Loaded(folders.learnt, blockwise, weights, adapter_set)
    return Trained(loaded, tokenizer, template_of(config.data, folders.tokenizer), device, room, tree)


def _fitting(
    config: Config,
    shape: T5ModelConfig,
    dtypes: tuple[torch.dtype, torch.dtype],
    total_bytes: Callable[[Weights], int],
    room: Room,
) -> tuple[Weights, ExecutionPlan]:
    """The weights that stay in memory, and where the others are kept: in a file as few blocks as suffice, or all by `weights_in`.

    Args:
        dtypes: of weights at rest and of products. total_bytes: of everything while it writes.
    Raises:
        DoesNotFit: what is left does not fit either.
    """
    machine = Machine(room.total_bytes, room.total_bytes)
    work = Workload(shape, 1, 1, 1, False, "adafactor")
    whole = _weights(shape, *dtypes)
    storage, compute = (str(dtype).removeprefix("torch.") for dtype in dtypes)

    def with_offloaded(blocks: int) -> tuple[Weights, ExecutionPlan]:
        plan = ExecutionPlan(1, 1, 1, 0, 1, storage, compute, loss_chunk_bytes=0)
        if not blocks:
            return whole, plan
        plan = replace(plan, offloaded_blocks=blocks, weights_in=FILE)
        resident = whole.bytes - away_bytes(work, plan) + slots_bytes(work, plan, machine)
        return replace(whole, bytes=resident), plan

    num_blocks = shape.num_layers + shape.num_decoder_layers
    allowed = weights_in_to_try(config, machine)
    least = 0 if DEVICE in allowed else num_blocks
    most = num_blocks if FILE in allowed else 0
    for blocks in range(least, most + 1):
        weights, plan = with_offloaded(blocks)
        if total_bytes(weights) <= room.total_bytes:
            return weights, plan
    # The weights alone fit: what the answers lack is said once the prompts are known.
    if DEVICE in allowed and whole.bytes + room.base_bytes <= room.total_bytes:
        return with_offloaded(0)
    if weights.bytes + room.base_bytes <= room.total_bytes:
        return weights, plan
    raise DoesNotFit(
        "--memory_budget = {total_bytes}, does not hold the model's {size} of weights beside {base_bytes} of the program; raise it to {least} or more, or try --mixed_precision=bf16",
        total_bytes=format_size(room.total_bytes),
        size=format_size(weights.bytes),
        base_bytes=format_size(room.base_bytes),
        least=typed_size(total_bytes(weights)),
    )


def _choose_dtypes(config: Config, device: Device, folder: Path, fits_wide: bool) -> tuple[torch.dtype, DtypeChoice]:
    """Dtype of the weights at rest, and that of products; fp16 gives way to what the device multiplies fast, and to fp32 for int8."""
    asked, stored = config.memory.mixed_precision, hf_format.stored_dtype(folder)
    is_wide = stored not in (torch.bfloat16, torch.int8)
    chosen = device.choose_compute_dtype("no" if asked == AUTO and is_wide else asked)
    if stored == torch.int8:
        if chosen.dtype == torch.float16:
            chosen = DtypeChoice(
                torch.float32, say("fp32 products: those of int8 weights overflow in fp16"), asked == AUTO
            )
        return stored, chosen
    if chosen.dtype == torch.float16:
        return torch.float16, chosen
    if asked == "no" or (is_wide and asked != "bf16" and chosen.dtype == torch.float32):
        return torch.float32, chosen
    if chosen.dtype == torch.float32 and asked != "bf16" and fits_wide:
        return torch.float32, chosen
    return torch.bfloat16, chosen


def _weights(shape: T5ModelConfig, storage: torch.dtype, compute: torch.dtype) -> Weights:
    count = weight_counts(shape)["total"]
    return Weights(
        count * storage.itemsize, storage != compute, name_of(compute), kernels() is not None, small_heap=True
    )
