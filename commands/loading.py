"""Loading a trained model inside the budget.

Its weights are held in the dtype of the folder, computed in what this device multiplies fast. Where a chip multiplies
only fp32 fast, bf16 weights would have to be widened each time a block runs, for every token: they are loaded as
fp32 where that fits. Weights in int8 stay so. Where the folder holds an adapter, its base is loaded and the adapter put on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import devices
from config import Config, T5ModelConfig, UserError
from data.text.templates import Template, template_of
from data.tokenizers.tokenizer import Tokenizer
from devices.base import Device, DtypeChoice, name_of
from devices.cores import use_threads
from devices.kernels.calls import kernels, use
from devices.malloc import trim_malloc, tune_malloc
from engine.blockwise import Blockwise, no_trim
from engine.objectives.labels import LabelObjective
from engine.weight_offload.store import offloaded_store
from engine.weights import weight_store_for
from language import join, say
from memory.budget import Budget, measure_budget
from memory.estimate.disk import is_in_memory
from memory.estimate.generation import LIBRARIES_BYTES, MARGIN, AnswerBudget, Weights, Writing, predict_generation
from memory.estimate.weight_offload import away_bytes, slots_bytes
from memory.estimate.workload import DEVICE, FILE, ExecutionPlan, Machine, Workload
from memory.observe.monitor import Monitor
from memory.observe.processes import ProcessTree
from memory.weight_offload import rests_in_memory, weights_folder
from model import hf_format
from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer
from model.formats.adapter_folder import adapter_bytes
from model.formats.answering import DRAWN, GENERATION_FILE, SEARCH, answers_by, remarks
from model.formats.checksums import refuse_damaged
from model.loss import LossSettings
from model.shapes import weight_counts
from model.t5 import in_memory
from settings.consistency import answer_problems, idle_search, ranking_problems
from settings.errors import DoesNotFit, OverBudget
from settings.fields import AUTO, counted
from training.checkpoints.runs import model_folder, near_folder, newest_run
from training.evaluation.answers import answer_all, best_answers
from training.processes.launch import num_processes, rank
from training.report.progress import Progress
from training.setup.adapter_settings import adapter_folders, base_of, learnt_last, shape_of, tokenizer_folder
from training.setup.adapters import AdapterSet, attach
from units import format_size, typed_size

# Of the budget, that one answer of the longest may take before malloc is told to keep the heap small: gaps between tensors of
# prompts of many lengths grow it by a tenth over some dozens of them
ROOMY_SHARE = 0.8


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

    def does_not_hold(self, what: str, parts: Mapping[str, int], *hints: str) -> DoesNotFit:
        """That it needs more: component -> bytes, and what would help beside a larger budget."""
        shown = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
        more = f"--memory_budget={typed_size(sum(parts.values()))} or more"
        return DoesNotFit(
            f"--memory_budget = {format_size(self.total_bytes)}, does not hold {what}: {shown}; try {', '.join([more, *hints])}"
        )


@dataclass
class Trained:
    """A model ready to use, and what goes with it; `folder`: of the adapter that is on, or else of the model."""

    folder: Path
    blockwise: Blockwise
    tokenizer: Tokenizer
    template: Template
    device: Device
    weights: Weights
    room: Room
    adapters: AdapterSet | None = None
    tree: AnswerTree | None = None  # of the answers that there are; None: any
    monitor: Monitor = field(init=False)
    kept: AnswerBudget = field(init=False)

    def __post_init__(self) -> None:
        budget = self.room.budget
        self.monitor = Monitor(budget.host_bytes, self.device, device_budget_bytes=budget.device_bytes)
        self.kept = AnswerBudget(
            lambda writing: sum(self.predict(writing).values()), self.room.total_bytes, self.monitor
        )

    def predict(self, writing: Writing) -> dict[str, int]:
        """What writing takes at its highest: component -> bytes."""
        writing = writing if self.tree is None else replace(writing, choices=self.tree.most_choices(writing.beams))
        return predict_generation(self.blockwise.model.config, self.weights, writing, self.room.base_bytes)

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
        what = f"{counted(writing.rows, 'answer')} of up to {writing.new_tokens} tokens to prompts of up to {writing.source_tokens}"
        return self.room.does_not_hold(what, self.predict(writing) if parts is None else parts, *hints)

    def answer(self, inputs: list[list[int]], config: Config) -> list[list[int]]:
        """Token ids of the answers to prompts, by the settings of `config.generate`, as many at once as fit or were asked for.

        Raises:
            DoesNotFit: as `rows_at_once`.
        """
        asked = config.answer.generate_batch_size
        return answer_all(
            self.blockwise,
            inputs,
            config.generate,
            lambda writing: self.rows_at_once(asked, writing),
            config.run.seed,
            self.kept,
            self.tree,
        )

    def best_answers(self, inputs: list[list[int]], config: Config) -> list[list[ScoredAnswer]]:
        """The `num_answers` best to each prompt, or as many as there are; otherwise as `answer`."""
        asked = config.answer.generate_batch_size
        found = best_answers(
            self.blockwise, inputs, config.generate, lambda writing: self.rows_at_once(asked, writing), self.kept, self.tree
        )  # fmt: skip
        return [best[: config.answer.num_answers] for best in found]


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
        raise room.does_not_hold("the model", parts)
    with watched(Monitor(room.budget.host_bytes, device)):
        yield


def writing_of(config: Config, rows: int, longest: int | None = None) -> Writing:
    """What `config` asks to be written, for prompts of at most `longest` tokens, by default max_seq_len."""
    how = config.generate
    source = min(longest or config.data.max_seq_len, config.data.max_seq_len)
    return Writing.by(how, rows, source)


def answering(config: Config, folder: Path, adapters: list[Path], searches: bool = True) -> Config:
    """The settings with what a model's folder says of how it answers, where nobody has said so for now; it is told.

    Args:
        folder: of the model. adapters: over it; what the one that is on says goes before. searches: whether there is a beam
            search here.
    Raises:
        UserError: the folder asks for what cannot be done.
    """
    given = {name for name in vars(config.generate) if config.given(name)}
    if config.generate.num_beams > 1 or ("temperature" in given and config.generate.temperature == 0.0):
        given |= set(DRAWN)
    if config.generate.temperature > 0.0 or not searches:
        given |= set(SEARCH)
    own, problems, notes = dict[str, Any](), list[str](), list[str]()
    for place in dict.fromkeys((base_of(folder), learnt_last(folder, adapters))):
        found, wrong = answers_by(place, given)
        own, problems = own | found, problems + wrong
        notes += [say("{keys}: unknown, ignored", keys=keys) for keys in remarks(place)]
    own = {name: value for name, value in own.items() if value != getattr(config.generate, name)}
    if own.get("num_beams", config.generate.num_beams) == 1:
        own = {name: value for name, value in own.items() if name not in SEARCH}
    config = config.changed(**own)
    if problems := problems or [f"{GENERATION_FILE}: {problem}" for problem in answer_problems(config)]:
        raise UserError(*problems)
    if problems := list(ranking_problems(config)):
        raise UserError(*problems)
    notes = [*(idle_search(config) if searches else []), *notes]
    if own:
        settings = ", ".join(f"--{name}={value}" for name, value in own.items())
        text = "generating with {settings} from the model's {file}; flags override it"
        notes.append(say(text, settings=settings, file=GENERATION_FILE))
    for note in notes:  # beside the answers, which a script may read from standard output
        Progress(1, rank() == 0, stream=sys.stderr).note(note)
    return config


def find_model(config: Config) -> Path:
    """The folder that `--model` names; auto: the base of the adapter that is named, else the newest run's model.

    Raises:
        UserError: there is none.
    """
    named, adapters = config.checkpoint.model, config.checkpoint.adapter
    if named == AUTO and adapters is not None:
        return base_of(adapter_folders(Path(), adapters)[0])
    if named == AUTO:
        run = newest_run(config.run.output_dir, needs_model=True)
        if run is None:
            raise UserError(
                f"--model = auto, there is no trained model in {config.run.output_dir}; give a folder, or train first"
            )
        named = str(run)
    folder = model_folder(named) or Path(named)
    if folder.is_file():
        told = "--model = {folder}, is a file; give the folder with config.json, model.safetensors and tokenizer.json"
        raise UserError(say(told, folder=named))
    if not folder.is_dir():
        raise UserError(
            say(
                "--model = {folder}, no such folder; give one with config.json, model.safetensors and tokenizer.json",
                folder=named,
            )
            + near_folder(folder)
        )
    return folder


def check_one_process(command: str) -> None:
    """Refuse to do the same work several times over.

    Raises:
        UserError: a launcher has started several processes.
    """
    if num_processes() > 1:
        raise UserError(f"{command}, works with one process; start it by python, without accelerate launch or torchrun")


def find_answering(
    config: Config, searches: bool = True, several: bool = False, writes: bool = False
) -> tuple[Config, Path, list[Path]]:
    """The folder that `--model` names, the adapters over it, and the settings with what they say of how they answer.

    Args:
        searches: whether there is a beam search here. several: whether there is somebody who changes between adapters. writes:
            whether text has to be written.
    Raises:
        UserError: there is none, it writes no text, it asks for what cannot be done, or several adapters, where only one can be on.
    """
    folder = find_model(config)
    adapters = adapter_folders(folder, config.checkpoint.adapter)
    if len(adapters) > 1 and not several:
        names = ",".join(map(str, adapters))
        raise UserError(f"--adapter = {names}, only one can be on here; give one (chat changes between several)")
    shape = shape_of(learnt_last(folder, adapters), base_of(folder))
    if writes and not shape.is_text:
        raise UserError(
            f"--model = {folder}, is an encoder (--head={shape.head}) and writes no text; give a model with a decoder, or use evaluate or "
            "embed"
        )
    if not shape.is_text:
        return config, folder, adapters
    return answering(config, folder, adapters, searches), folder, adapters


def load_trained(config: Config, folder: Path, writing: Writing, tree: AnswerTree | None = None) -> Trained:
    """Load a model for use.

    Args:
        writing: the least that will be written with it. tree: the answers that there are, measured with what
            the process holds already; None: any.
    Raises:
        UserError: the folder is not usable. DoesNotFit: the model is larger than the budget.
    """
    tune_malloc("fast")
    use_threads(config.run.num_threads)
    use(config.run.compiled_kernels is not False)
    device = devices.pick(config.run.device)
    home, adapters = base_of(folder), adapter_folders(folder, config.checkpoint.adapter)
    for place in dict.fromkeys((folder, home, *adapters)):
        refuse_damaged(place, "adapter" if place in adapters else "model")
    learnt = learnt_last(folder, adapters)
    shape = shape_of(learnt, home)
    texts = tokenizer_folder(learnt, home)
    tokenizer = Tokenizer.load(texts)
    if tokenizer.size > shape.vocab_size:
        raise UserError(
            f"--model = {folder}, its tokenizer has {tokenizer.size} tokens and the model {shape.vocab_size}: they do not match"
        )
    room = Room.measure(config, device)
    room = replace(room, base_bytes=room.base_bytes + sum(map(adapter_bytes, adapters)))  # they lie beside the model
    storage, chosen = _choose_dtypes(config, device, shape, home, writing, room)
    if not chosen.as_requested:  # beside the answers, which a script may read from standard output
        told = f"--mixed_precision = {config.memory.mixed_precision}, {chosen.reason}"
        Progress(1, rank() == 0, stream=sys.stderr).note(told)
    compute = chosen.dtype
    weights, homes = _fitting(config, shape, storage, compute, writing, room)
    roomy = replace(weights, small_heap=False)
    if sum(predict_generation(shape, roomy, writing, room.base_bytes).values()) <= ROOMY_SHARE * room.total_bytes:
        weights = roomy
    else:
        tune_malloc("small")
    offloaded = offloaded_store(homes, device, weights_folder(config))
    cut, filling = (None, in_memory) if offloaded is None else (offloaded.make, offloaded.filling)
    model = hf_format.load(home, storage, device.torch_device, expect=shape, cut=cut, filling=filling)
    adapter_set = attach(model, adapters, home) if adapters else None
    weight_store = offloaded or weight_store_for(storage, compute, (model.embedding, model.output_weight))
    trim = no_trim if device.is_separate_memory else trim_malloc
    objective = None if model.label_head is None else LabelObjective(model.label_head)
    blockwise = Blockwise(model, 0, weight_store, LossSettings(), 0.0, objective, trim=trim)
    made = Trained(
        learnt, blockwise, tokenizer, template_of(config.data, texts), device, weights, room, adapter_set, tree
    )
    made.monitor.interval_seconds = config.memory.monitor_seconds
    return made


def _fitting(
    config: Config, shape: T5ModelConfig, storage: torch.dtype, compute: torch.dtype, writing: Writing, room: Room
) -> tuple[Weights, ExecutionPlan]:
    """The weights that stay in memory, and where the others rest: in a file as few blocks as suffice, or all by `weights_in`.

    Raises:
        DoesNotFit: what is left does not fit either.
    """
    whole, blocks = _weights(shape, storage, compute), shape.num_layers + shape.num_decoder_layers
    work, machine = Workload(shape, 1, 1, 1, False, "adafactor"), Machine(room.total_bytes, room.total_bytes)
    rest, products = (str(dtype).removeprefix("torch.") for dtype in (storage, compute))
    here = ExecutionPlan(1, 1, 1, 0, 1, rest, products, loss_chunk_bytes=0)
    asked, weights = config.memory.weights_in, whole
    if asked in (AUTO, FILE) and is_in_memory(weights_folder(config)):
        if asked == FILE:
            raise UserError(rests_in_memory(weights_folder(config)))
        asked = DEVICE
    for away in {FILE: (blocks,), AUTO: range(blocks + 1)}.get(asked, (0,)):
        choice = replace(here, away_blocks=away, weights_in=FILE if away else here.weights_in)
        resident = whole.bytes - away_bytes(work, choice) + slots_bytes(work, choice, machine)
        weights = replace(whole, bytes=resident)
        if sum(predict_generation(shape, weights, writing, room.base_bytes).values()) <= room.total_bytes:
            return weights, choice
    for held, way in ((whole, here), (weights, choice)) if asked != FILE else ((weights, choice),):
        if held.bytes + room.base_bytes <= room.total_bytes:
            return held, way  # what writing lacks is told once the prompts are known
    raise DoesNotFit(
        f"--memory_budget = {format_size(room.total_bytes)}, does not hold the model's {format_size(weights.bytes)} of "
        f"weights beside {format_size(room.base_bytes)} of the program; raise it, or try --mixed_precision=bf16"
    )


def _choose_dtypes(
    config: Config, device: Device, shape: T5ModelConfig, folder: Path, writing: Writing, room: Room
) -> tuple[torch.dtype, DtypeChoice]:
    """Dtype of the weights at rest, and that of products; fp16 gives way to what the device multiplies fast, and to fp32 for int8."""
    asked, stored = config.memory.mixed_precision, hf_format.stored_dtype(folder)
    is_wide = stored not in (torch.bfloat16, torch.int8)
    chosen = device.choose_compute_dtype("no" if asked == AUTO and is_wide else asked)
    if stored == torch.int8:
        if chosen.dtype == torch.float16:
            chosen = DtypeChoice(torch.float32, "fp32 products: those of int8 weights overflow in fp16", asked == AUTO)
        return stored, chosen
    if chosen.dtype == torch.float16:
        return torch.float16, chosen
    if asked == "no" or (is_wide and asked != "bf16" and chosen.dtype == torch.float32):
        return torch.float32, chosen
    wide = _weights(shape, torch.float32, torch.float32)
    fits_wide = sum(predict_generation(shape, wide, writing, room.base_bytes).values()) <= room.total_bytes
    if chosen.dtype == torch.float32 and asked != "bf16" and fits_wide:
        return torch.float32, chosen
    return torch.bfloat16, chosen


def _weights(shape: T5ModelConfig, storage: torch.dtype, compute: torch.dtype) -> Weights:
    count = weight_counts(shape)["total"]
    return Weights(
        count * storage.itemsize, storage != compute, name_of(compute), kernels() is not None, small_heap=True
    )
