"""Exported ONNX files: `python -m benchmarks.exports --model=FOLDER [--large=PRESET] [--write=True]`.

FOLDER is a trained date model, such as `make train` leaves in model_save. Measured: the time of a token against the
answer's length, in onnxruntime on one core, with the cache and, for comparison, with the whole answer read again; sizes
and exact match on the held-out dates in fp32 and in each smaller precision; and what exporting a model of --large, with
random weights in bf16, takes under --memory_budget (8G).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.page import markdown, show_section
from benchmarks.parts import children
from benchmarks.parts.random_models import write_random_model
from data.sources.dates import build_sample_dates
from data.tokenizers.tokenizer import Tokenizer
from model.formats.shape_file import read_config
from settings.declared import T5ModelConfig
from settings.precedence import model_presets
from support.storage import folder_bytes
from support.units import format_size

OPTIONS = {"model": "", "large": "", "budget": "8G", "write": "False"}
PRECISIONS = ("fp16", "int8", "q4")
LENGTHS = (16, 64, 256)
REPEATS = 5
ROWS = 400
TOGETHER = 50


def exported(model: str | Path, folder: Path, *flags: str) -> children.Child:
    """Export a model as ONNX in a child process."""
    words = ["train_low_mem.py", "export", f"--model={model}", f"--output={folder}", "--format=onnx", *flags]
    return children.must_run(words)


def token_times(folder: Path) -> dict[str, dict[int, float]]:
    """Milliseconds of a token, by the answer's length: the median of some answers, each of exactly that length."""
    from commands.exporting.onnx_run import CachedDecoder, padded, session

    torch.set_num_threads(1)
    shape = T5ModelConfig(**model_presets()["t5-small"])
    inputs = padded([[*range(3, 34), shape.eos_token_id]])
    (states,) = session(folder / "onnx" / "encoder_model.onnx").run(None, inputs)
    decoder = session(folder / "onnx" / "decoder_model_merged.onnx")
    times: dict[str, dict[int, float]] = {"with the cache": {}, "read again": {}}
    for length in LENGTHS:
        ids = np.random.default_rng(0).integers(3, shape.vocab_size, (1, length))
        measured: dict[str, list[float]] = {name: [] for name in times}
        for _ in range(REPEATS):
            began = time.perf_counter()
            cached = CachedDecoder(decoder, shape, states, inputs["attention_mask"])
            for position in range(length):
                cached.step(ids[:, position : position + 1])
            measured["with the cache"].append((time.perf_counter() - began) / length)
        for position in np.linspace(1, length, 8).astype(int):  # The mean of these is that of all prefixes.
            began = time.perf_counter()
            CachedDecoder(decoder, shape, states, inputs["attention_mask"]).step(ids[:, :position])
            measured["read again"].append(time.perf_counter() - began)
        times["with the cache"][length] = 1000 * statistics.median(measured["with the cache"])
        times["read again"][length] = 1000 * statistics.mean(measured["read again"])
    return times


def exact_match(folder: Path, shape: T5ModelConfig, rows: list[dict[str, str]], suffix: str) -> float:
    """The share of dates that an exported model reads right, in percent."""
    from commands.exporting.onnx_run import CachedDecoder, padded, session

    tokenizer = Tokenizer.load(folder)
    encoder = session(folder / "onnx" / f"encoder_model{suffix}.onnx")
    decoder = session(folder / "onnx" / f"decoder_model_merged{suffix}.onnx")
    right = 0
    for start in range(0, len(rows), TOGETHER):
        part = rows[start : start + TOGETHER]
        prompts = tokenizer.encode_prompts([row["prompt"] for row in part])
        inputs = padded([[*ids, shape.eos_token_id] for ids in prompts])
        (states,) = encoder.run(None, inputs)
        answers = CachedDecoder(decoder, shape, states, inputs["attention_mask"]).answers(shape, 16)
        texts = [tokenizer.decode(ids).strip() for ids in answers]
        right += sum(text == row["response"] for text, row in zip(texts, part, strict=True))
    return 100 * right / len(rows)


def graph_bytes(folder: Path, suffix: str) -> int:
    """Bytes of a model's graphs in one precision."""
    names = (f"encoder_model{suffix}.onnx", f"decoder_model_merged{suffix}.onnx")
    return sum((folder / "onnx" / name).stat().st_size for name in names)


def main(arguments: list[str]) -> None:
    """Measure in turn; all flags are --name=value."""
    _, options = children.options_of(arguments, OPTIONS, str(__doc__))
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_random_model(root / "small", T5ModelConfig(**model_presets()["t5-small"]))
        Tokenizer.load(options["model"]).save(root / "small")
        exported(root / "small", root / "small-onnx")
        figures["milliseconds of a token"] = token_times(root / "small-onnx")
        lines = build_sample_dates(str(root / "cache")).valid.read_text(encoding="utf8").splitlines()[:ROWS]
        rows = [json.loads(line) for line in lines]
        shape = read_config(options["model"])
        figures["precisions"] = []
        for precision in PRECISIONS:
            folder = root / precision
            exported(options["model"], folder, f"--quantize={precision}")
            suffixes = (
                {precision: f"_{precision}"} if figures["precisions"] else {"fp32": "", precision: f"_{precision}"}
            )
            for name_, suffix in suffixes.items():
                figures["precisions"].append(
                    [name_, graph_bytes(folder, suffix), exact_match(folder, shape, rows, suffix)]
                )
        if options["large"]:
            write_random_model(root / "large", T5ModelConfig(**model_presets()[options["large"]]), torch.bfloat16)
            Tokenizer.load(options["model"]).save(root / "large")
            child = exported(root / "large", root / "large-onnx", f"--memory_budget={options['budget']}")
            size = folder_bytes(root / "large-onnx")
            figures["large"] = [options["large"], options["budget"], child.peak_bytes, size, child.seconds]
    show_section("exports", "Exports to ONNX", table(figures), figures, is_written=options["write"] == "True")


def table(figures: dict[str, Any]) -> str:
    """The figures as three tables, those of the large model only where it was measured."""
    rows = [
        [name, *(f"{times[length]:.1f}" for length in LENGTHS)]
        for name, times in figures["milliseconds of a token"].items()
    ]
    header = ["ms a token of t5-small's width, one core; answers of", *(f"{length} tokens" for length in LENGTHS)]
    parts = [markdown(header, rows)]
    largest = figures["precisions"][0][1]
    rows = [
        [name, format_size(size), f"{size / largest:.2f}", f"{match:.2f}"]
        for name, size, match in figures["precisions"]
    ]
    parts.append(markdown(["date model", "graphs", "share of fp32", f"exact match of {ROWS} dates, %"], rows))
    if "large" in figures:
        name, budget, peak, size, seconds = figures["large"]
        cells = [name, budget, format_size(peak), format_size(size), f"{seconds / 60:.0f}"]
        parts.append(markdown(["bf16 model", "budget", "peak (anonymous)", "written", "minutes"], [cells]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
