"""The steps that are measured on a GPU, and the systems that take them, in the order in which they are measured."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np

from benchmarks.traced.traced_step import TracedWork
from settings.declared import T5ModelConfig, TrainConfig
from settings.precedence import model_presets

TINY = T5ModelConfig(vocab_size=320, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4)
SMALL = T5ModelConfig(**model_presets()["t5-small"])
BASE = T5ModelConfig(**model_presets()["t5-base"])
AKKADIAN = T5ModelConfig(
    vocab_size=4000, d_model=384, d_kv=64, d_ff=1536, num_layers=6, num_decoder_layers=3, num_heads=6
)
COMPILE = "compile"  # The setting that has blocks compiled.
HAS_COMPILE = COMPILE in {field.name for field in fields(TrainConfig)}


class Mode(NamedTuple):
    """How many blocks keep their activations (None: all), and whether blocks are compiled."""

    saved_blocks: int | None
    is_compiled: bool = False


MODES = {"ours-standard": Mode(None), "ours-ultra": Mode(0), "ours-compiled": Mode(None, is_compiled=True)}
PEERS = ("amp", "regional")
SYSTEMS = ("ours-standard", "ours-ultra", "amp", "ours-compiled", "regional")  # Those that compile come last.


def ragged(rows: int, source: tuple[int, int], target: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Rows of random lengths between two bounds, log-uniform, as texts have them."""
    draw = np.random.default_rng(3)
    sides = [np.exp(draw.uniform(np.log(low), np.log(high), rows)).astype(int) for low, high in (source, target)]
    return tuple(zip(*(side.tolist() for side in sides), strict=True))


WORKS = {
    "small8": TracedWork(SMALL, "cuda", ((512, 114),) * 8),
    "base32": TracedWork(BASE, "cuda", ((512, 114),) * 32, dropout=0.1),
    "akk128": TracedWork(AKKADIAN, "cuda", ragged(128, (8, 200), (6, 150)), dropout=0.1),
    "baserag": TracedWork(BASE, "cuda", ragged(64, (24, 512), (6, 128)), dropout=0.1),
    "tiny": TracedWork(TINY, "cuda", ragged(16, (20, 60), (5, 20)), dropout=0.1),
}
MEASURED = tuple(WORKS)[:-1]  # `tiny` is for machines without a GPU.
