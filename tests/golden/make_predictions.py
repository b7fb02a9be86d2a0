"""Which predictions were compared with measurements? Kept, so that a formula of `memory/cost/` changes on purpose alone.

    python -m tests.golden.make_predictions

writes `predictions.json`: what the plan's formulas say of small models in the ways that a step can go, on a CPU, a GPU and a Mac.
`tests/memory/cost/test_kept_predictions.py` compares. Who changes a formula measures again (the slow tests below
`tests/memory/`, `benchmarks/`), runs this, and finds in the difference of the file what the change does to every part.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from config import T5ModelConfig, load
from devices.processor import AVX512_BF16
from memory.cost.disk import disk_need
from memory.cost.duration import Schedule, predict_times
from memory.cost.generation import Weights, Writing, predict_generation, serving_capacity
from memory.cost.homes import away_bytes, taken_bytes
from memory.cost.prediction import Choice, Machine, Work, offloaded_bytes, predict, predict_seconds
from memory.cost.shapes import Shapes
from memory.cost.trained import trained_counts
from memory.cost.work import FILE, RAM
from model.shapes import weight_counts
from units import GIB, MIB

PATH = Path(__file__).with_name("predictions.json")
SHAPE = {
    "vocab_size": 8192, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 8,
}  # fmt: skip
T5 = T5ModelConfig(**SHAPE)
GATED = replace(T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False, bias_in_every_layer=True)
RATES = (("float32", 1.5e11), ("bfloat16", 4e11), ("float16", 4e11))
CPU = Machine(GIB, GIB, 200 * MIB, RATES, speed_class=AVX512_BF16.name, measured=(("float32", 1.2e11),))
CUDA = Machine(
    4 * GIB, 8 * GIB, 0, RATES, pads_attention=True, fuses_attention=True, widens_whole=True, host_bytes=16 * GIB,
    speed_class="cuda",
)  # fmt: skip
MAC = Machine(2 * GIB, 4 * GIB, 300 * MIB, RATES, pads_attention=True, widens_whole=True, speed_class="mps")
SCHEDULE = Schedule(1000, 5, 4, 100, 64, 3, 40, 20)


def uneven() -> Shapes:
    """Rows of many lengths, the longest of more tokens than a tile."""
    draw = np.random.default_rng(0)
    return Shapes(draw.integers(20, 700, (5, 8)), draw.integers(5, 120, (5, 8)), is_complete=False, max_tokens=4000)


EVEN = Work(T5, 8, 192, 64, True, "adafactor", sample_rows=2)
UNEVEN = replace(EVEN, source_tokens=700, target_tokens=120, shapes=uneven(), evaluation=uneven())
SAVING = Choice(8, 1, 1, 5, 8, "float32", "float32", 8 * MIB)
RECOMPUTING = replace(SAVING, saved_blocks=0, malloc="small")
CUT = replace(SAVING, batch_size_per_gpu=2, micro_batches_per_pass=4, saved_blocks=3)
ON_GPU = replace(CUT, storage="bfloat16", compute="bfloat16", scores=1 << 18)


def adapters(**flags: Any) -> Any:
    """What learns with adapters, in the shape of all others."""
    words = {"train_file": "x", "is_finetune": True, "lora_rank": 4, **SHAPE, **flags}
    return trained_counts(load("train", {name: str(value) for name, value in words.items()}))


def sized(work: Work, choice: Choice) -> Choice:
    """A choice whose micro-batches are filled up as the plan does it."""
    source, target = work.step_shapes.sizes(choice.batch_size_per_gpu)
    return replace(choice, source_sizes=source, target_sizes=target)


def cases() -> dict[str, tuple[Work, Choice, Machine]]:
    """Ways that a step can go."""
    gated, dry = replace(UNEVEN, model=GATED), replace(UNEVEN, dropout=False)
    shards, two = replace(CUDA, num_processes=4), replace(CPU, num_processes=2)
    held = replace(CUT, micro_batches_per_pass=1, accumulation_passes=4, saved_blocks=5)
    few = replace(T5, vocab_size=300)  # of whose logits nothing comes above the blocks
    wide = replace(few, d_model=128, d_kv=64)  # as T5-11B: attention is wider than the model
    short = Work(few, 64, 12, 6, True, "adafactor")
    few_words = replace(UNEVEN, model=few)
    trained = replace(EVEN, trained=adapters())
    return {
        "saved": (EVEN, SAVING, CPU),
        "saved, untrimmed": (EVEN, replace(SAVING, malloc="untrimmed"), CPU),
        "cut, untrimmed": (UNEVEN, replace(CUT, saved_blocks=5, malloc="untrimmed"), CPU),
        "recomputed": (EVEN, RECOMPUTING, CPU),
        "recomputed, cut, heap kept": (gated, replace(CUT, saved_blocks=0), CPU),
        "cut": (UNEVEN, CUT, CPU),
        "one block saved": (EVEN, replace(SAVING, saved_blocks=1), CPU),
        "gated, compiled kernels": (gated, replace(CUT, kernels=True), CPU),
        "relu, compiled kernels": (dry, replace(RECOMPUTING, kernels=True), CPU),
        "bfloat16": (UNEVEN, replace(RECOMPUTING, storage="bfloat16", compute="bfloat16"), CPU),
        "bfloat16 at rest": (gated, replace(RECOMPUTING, storage="bfloat16", malloc="fast"), CPU),
        "remainders": (replace(EVEN, rounding="compensated"), replace(CUT, storage="bfloat16"), CPU),
        "corrected": (EVEN, SAVING, replace(CPU, correction=1.2)),
        "gradients held": (replace(UNEVEN, optimizer="adamw"), held, CPU),
        "clipped": (replace(EVEN, hold_gradients=True), SAVING, CPU),
        "two processes": (replace(UNEVEN, optimizer="adamw_8bit"), CUT, two),
        "two answers": (replace(UNEVEN, answers=2), replace(CUT, saved_blocks=1), CPU),
        "few words": (few_words, SAVING, CPU),
        "few words, gated, compiled kernels": (replace(few_words, model=replace(few, feed_forward_proj="gated-gelu")), replace(CUT, kernels=True), CPU),
        "bfloat16 at rest, decoder saved": (UNEVEN, replace(SAVING, storage="bfloat16", saved_blocks=2), CPU),
        "wide attention, long answers": (replace(EVEN, model=wide, source_tokens=24, target_tokens=400, dropout=False), CUT, CPU),
        "wide attention, compiled kernels": (replace(dry, model=wide), replace(CUT, kernels=True), CPU),
        "many short rows": (short, replace(SAVING, batch_size_per_gpu=64), CPU),
        "many short rows, compiled kernels": (short, replace(CUT, batch_size_per_gpu=16, kernels=True), CPU),
        "long answers": (replace(EVEN, source_tokens=24, target_tokens=500, dropout=False), replace(CUT, saved_blocks=2), CPU),
        "long answers, recomputed": (replace(gated, shapes=None, source_tokens=24, target_tokens=500), RECOMPUTING, CPU),
        "adapters": (trained, SAVING, CPU),
        "adapters over int8": (trained, replace(CUT, storage="int8"), CPU),
        "adapters over int4 in a file": (trained, replace(CUT, storage="int4", weights_in=FILE, away_blocks=4, saved_blocks=0), CPU),
        "weights in a file": (EVEN, replace(RECOMPUTING, weights_in=FILE, away_blocks=3), CPU),
        "GPU": (dry, ON_GPU, CUDA),
        "GPU, dropped": (replace(UNEVEN, optimizer="muon"), replace(ON_GPU, saved_blocks=5), CUDA),
        "GPU, gated": (replace(gated, dropout=False, optimizer="sinkgd"), ON_GPU, CUDA),
        "GPU, even rows": (replace(EVEN, dropout=False), replace(ON_GPU, batch_size_per_gpu=8, micro_batches_per_pass=1), CUDA),
        "GPU, moved beside it": (dry, replace(ON_GPU, saved_blocks=0, offload_boundaries=True, weights_in=RAM, away_blocks=2), CUDA),
        "GPU, most saved": (dry, replace(ON_GPU, saved_blocks=4, offload_boundaries=True), CUDA),
        "GPU, long answers": (replace(EVEN, source_tokens=24, target_tokens=500), replace(ON_GPU, saved_blocks=1), CUDA),
        "GPU, few words": (few_words, ON_GPU, CUDA),
        "Mac, few words": (replace(few_words, shapes=None, evaluation=None), ON_GPU, MAC),
        "GPU, many short rows": (replace(short, dropout=False), replace(ON_GPU, batch_size_per_gpu=64, micro_batches_per_pass=1), CUDA),
        "GPU, fp16": (EVEN, replace(SAVING, storage="float32", compute="float16", scores=1 << 16), CUDA),
        "GPU, shared out": (UNEVEN, replace(ON_GPU, shards=4), shards),
        "GPU, int8": (replace(trained, dropout=False), replace(ON_GPU, storage="int8"), CUDA),
        "Mac": (UNEVEN, replace(ON_GPU, storage="float32", compute="float32", saved_blocks=0), MAC),
        "Mac, bfloat16 at rest": (dry, replace(ON_GPU, compute="float32"), MAC),
    }  # fmt: skip


def of_step(work: Work, choice: Choice, machine: Machine) -> dict[str, dict[str, float]]:
    """Bytes of each part of each phase, and seconds."""
    choice = sized(work, choice)
    times = predict_times(work, choice, machine, SCHEDULE)
    beside = {
        "moved": offloaded_bytes(work, choice, machine),
        "away": away_bytes(work, choice),
        "taken": taken_bytes(work, choice),
    }
    longest = predict_seconds(work, choice, machine)
    seconds = {"step": times.step, "longest": longest, "around": times.around, "high": times.total().high}
    return {
        **{phase: dict(parts) for phase, parts in predict(work, choice, machine).items()},
        "beside": dict(beside),
        "seconds": seconds,
    }


def of_writing() -> dict[str, dict[str, float]]:
    """Bytes of answers that are written, and of those that are served."""
    found: dict[str, dict[str, float]] = {}
    for compute, is_cast in (("float32", True), ("bfloat16", False), ("float16", True)):
        held = Weights(4 * weight_counts(T5)["total"], is_cast, compute)
        for name, writing in {
            "greedy": Writing(24, 300, 64), "beams": Writing(3, 40, 200, beams=4), "sampled": Writing(64, 16, 8, sampled=True),
        }.items():  # fmt: skip
            found[f"{name}, {compute}"] = dict(predict_generation(T5, held, writing, 200 * MIB))
            capacity = serving_capacity(T5, held, writing, 200 * MIB, 330 * MIB, 4)
            if capacity is not None:
                counts = {"rows": capacity.rows, "tokens": capacity.tokens}
                found[f"served: {name}, {compute}"] = {**counts, **capacity.parts}
    return found


def of_disk() -> dict[str, dict[str, float]]:
    """Bytes that runs write."""
    found: dict[str, dict[str, float]] = {}
    away = replace(CUT, weights_in=FILE, away_blocks=3)
    runs = {
        "all": {"max_steps": 1000, "save_steps": 200, "eval_steps": 500, "keep_latest_n_ckp": 9}, "adapters": {"is_finetune": True, "lora_rank": 4},
        "frozen": {"freeze": "encoder", "max_steps": 100, "save_steps": 90, "eval_steps": 80, "keep_latest_n_ckp": 3},
    }  # fmt: skip
    for name, flags in runs.items():
        words = {"train_file": "x", **SHAPE, **flags}
        config = load("train", {key: str(value) for key, value in words.items()})
        for choice, storage in ((None, "float32"), (away, "bfloat16")):
            need = disk_need(config, storage, choice, 2.5)
            sizes = {key: size for key, size in need.as_dict().items() if isinstance(size, int)}
            found[f"{name}, {storage}"] = {**sizes, "least_bytes": need.least_bytes}
    return found


def predictions() -> dict[str, dict[str, dict[str, float]]]:
    """All of them: name -> phase -> part -> bytes or seconds."""
    steps = {name: of_step(*case) for name, case in cases().items()}
    return {**steps, "writing": of_writing(), "disk": of_disk()}


def main() -> None:
    lines = []
    for name, phases in predictions().items():
        told = ",\n".join(f"  {json.dumps(phase)}: {json.dumps(parts)}" for phase, parts in phases.items())
        lines.append(f" {json.dumps(name)}: {{\n{told}\n }}")
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf8")


if __name__ == "__main__":
    main()
