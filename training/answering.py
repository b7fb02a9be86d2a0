"""What can be done with a trained model? Measure it on rows (`evaluate`), let it write (`generate`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import torch
from accelerate import Accelerator

import devices
from config import Config, T5ModelConfig, UserError, load
from data.lines import BadRows
from data.loader import StepLoader
from data.prepare import prepare_in_child
from data.reading import column_names, read_rows
from data.sources import find
from data.tokenizer import Tokenizer
from devices.base import Device
from engine.keep import Keep
from engine.residency import residency_for
from engine.walk import Walk
from memory.budget import measure_budget
from memory.monitor import Monitor
from memory.prediction import weight_counts
from memory.units import format_size
from model import hf_format
from model.generation import generate as write_answers
from model.loss import LossSettings
from settings import AUTO, DoesNotFit
from training.evaluation import Evaluation
from training.evaluation import evaluate as measure_loss
from training.progress import Progress
from training.runs import model_folder, newest_run
from training.startup import SETTINGS_FILE

EVALUATION_BATCH = 4  # rows at once where eval_batch_size_per_gpu is auto


@dataclass
class Trained:
    """A model ready to use, and what goes with it."""

    folder: Path
    walk: Walk
    tokenizer: Tokenizer
    device: Device


def find_model(config: Config) -> Path:
    """The folder that `--model` names; auto: the newest run's model.

    Raises:
        UserError: there is none.
    """
    named = config.checkpoint.model
    if named == AUTO:
        run = newest_run(config.run.output_dir, needs_model=True)
        if run is None:
            raise UserError(
                f"--model = auto, there is no trained model in {config.run.output_dir}; name a folder, or train first"
            )
        named = str(run)
    folder = model_folder(named) or Path(named)
    if not folder.is_dir():
        raise UserError(
            f"--model = {named}, no such folder; name one with config.json, model.safetensors and tokenizer.json"
        )
    return folder


def load_trained(config: Config, folder: Path) -> Trained:
    """Load a model for use, its weights as they are stored, computed in what this device multiplies fast.

    Raises:
        UserError: the folder is not usable. DoesNotFit: the model is larger than the budget.
    """
    device = devices.pick(config.run.device)
    shape = hf_format.read_config(folder)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.size > shape.vocab_size:
        raise UserError(
            f"--model = {folder}, its tokenizer has {tokenizer.size} tokens and the model {shape.vocab_size}: they do not match"
        )
    storage = torch.bfloat16 if _stored_dtype(folder) == torch.bfloat16 else torch.float32
    if config.memory.mixed_precision == "bf16":
        storage = torch.bfloat16
    compute = (
        device.choose_compute_dtype(config.memory.mixed_precision).dtype if storage == torch.bfloat16 else torch.float32
    )
    _check_fits(config, device, shape, storage)
    model = hf_format.load(folder, dtype=storage, device=device.torch_device)
    walk = Walk(model, Keep(0), residency_for(storage, compute), LossSettings(), 0.0)
    return Trained(folder, walk, tokenizer, device)


def _stored_dtype(folder: Path) -> torch.dtype:
    about = json.loads((folder / "config.json").read_text(encoding="utf8"))
    return torch.bfloat16 if "bfloat16" in (about.get("dtype"), about.get("torch_dtype")) else torch.float32


def _check_fits(config: Config, device: Device, shape: T5ModelConfig, storage: torch.dtype) -> None:
    budget = measure_budget(config.memory.memory_budget, device)
    room = budget.device_bytes if device.is_separate_memory and budget.device_bytes is not None else budget.host_bytes
    weights = weight_counts(shape)["total"] * storage.itemsize
    if weights > room:
        raise DoesNotFit(
            f"--memory_budget = {format_size(room)}, does not hold the model's {format_size(weights)} of weights; "
            "raise it, or try --mixed_precision=bf16"
        )


def evaluate(config: Config) -> Evaluation:
    """Measure loss and perplexity on `validation_file`, or on the rows that the model's run held out.

    Raises:
        UserError: model or data are not usable.
    """
    folder = find_model(config)
    config = _data_settings(config, folder)
    prepared = prepare_in_child(config)
    trained = load_trained(config, folder)
    loader = StepLoader(prepared.validation_dir, prepared.objective, config, config.memory.ultra_low_mem is True)
    rows = (
        config.train.eval_rows if config.given("eval_rows") or not config.given("validation_file") else loader.num_rows
    )
    asked = config.train.eval_batch_size_per_gpu
    batch_size = EVALUATION_BATCH if asked == AUTO else int(asked)
    accelerator = Accelerator(cpu=trained.device.name == "cpu")
    budget = measure_budget(config.memory.memory_budget, trained.device)
    with Monitor(budget.host_bytes, trained.device, config.memory.monitor_seconds) as monitor:
        result = measure_loss(
            trained.walk, loader.evaluation_batches(rows, batch_size), accelerator, trained.device.torch_device
        )
    cut = prepared.counts.get("validation_cut_rows", 0)
    Progress(1).table(
        f"evaluation of {folder}",
        [
            (
                "rows",
                f"{result.rows:,} of {loader.num_rows:,} ({prepared.objective})"
                + (f", {cut:,} were cut to the longest length" if cut else ""),
            ),
            ("target tokens", f"{result.tokens:,}"),
            ("loss", f"{result.loss:.4f}"),
            ("perplexity", f"{result.perplexity:,.2f}"),
            ("peak memory", f"{format_size(monitor.peak_bytes)} of {format_size(budget.host_bytes)}"),
        ],
    )
    return result


def _data_settings(config: Config, folder: Path) -> Config:
    """The run's own data settings under the flags of now; a validation file given is the only one that is read."""
    flags = {name: value for name, value in config.as_dict().items() if config.given(name)}
    saved = next(
        (place / SETTINGS_FILE for place in (folder, *folder.parents[:2]) if (place / SETTINGS_FILE).is_file()), None
    )
    if saved is not None:
        flags["config"] = str(saved)
    merged = load("train", {name: value for name, value in flags.items() if name != "model"})
    merged.data.tokenizer_dir, merged.model = str(folder), hf_format.read_config(folder)
    merged.checkpoint = config.checkpoint
    merged.origins["validation_file"] = "flag" if config.given("validation_file") else ""
    if config.given("validation_file"):
        merged.data.train_file, merged.data.max_samples = (
            merged.data.validation_file,
            1,
        )  # the other split is not needed
    return merged


def generate(config: Config) -> None:
    """Answer one text on the screen, or a file of prompts as JSON lines.

    Raises:
        UserError: model, input or output are not usable.
    """
    settings = config.generate
    if settings.input is None:
        raise UserError("--input = none, is needed: a text, or a file of prompts")
    prompts = _prompts(config, settings.input)
    trained = load_trained(config, find_model(config))
    with _output(settings.output) as out:
        while batch := list(islice(prompts, settings.generate_batch_size)):
            for prompt, answer in zip(batch, answer_all(trained, config, batch), strict=True):
                out.write(
                    json.dumps({"prompt": prompt, "response": answer}, ensure_ascii=False) + "\n"
                    if settings.output
                    else answer + "\n"
                )
                out.flush()


def answer_all(trained: Trained, config: Config, prompts: list[str]) -> list[str]:
    """Answer prompts at once. A prompt longer than max_seq_len is cut, and the user told."""
    longest, tokenizer, settings = config.data.max_seq_len, trained.tokenizer, config.generate
    ids = tokenizer.encode_batch(prompts, special=True)  # a prompt may hold sentinels to fill in
    cut = sum(len(row) >= longest for row in ids)
    if cut:
        Progress(1).note(f"{cut} prompt(s) are longer than --max_seq_len={longest} tokens and were cut")
    inputs = [[*row[: longest - 1].tolist(), tokenizer.eos_id] for row in ids]
    residency = trained.walk.residency
    answers = write_answers(
        trained.walk.model, inputs, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature,
        top_k=settings.top_k, top_p=settings.top_p, seed=config.run.seed,
        visit=residency.visit, compute_dtype=residency.compute_dtype,
    )  # fmt: skip
    return [tokenizer.decode(answer) for answer in answers]


def _prompts(config: Config, given: str) -> Iterator[str]:
    """The prompts of a file, or the text itself where no such file exists."""
    is_file = False
    with suppress(OSError, ValueError):  # a long text is no path name
        is_file = os.path.exists(given)
    if not is_file:
        return iter([given])
    sources = find(given)
    names = column_names(sources[0], config.data.text_column)
    column = config.data.prompt_column if config.data.prompt_column in names else config.data.text_column
    rows = read_rows(sources, [column], BadRows(config.data.skip_bad_rows), text_unit="line")
    return (row[0] for batch in rows for row in batch)


def _output(path: str | None) -> TextIO:
    if path is None:
        return os.fdopen(os.dup(1), "w", encoding="utf8")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "w", encoding="utf8")
    except OSError as error:
        raise UserError(f"--output = {path}, cannot be written: {error.strerror}; name another file") from None
