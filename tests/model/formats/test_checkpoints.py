"""The table of published checkpoints in docs/finetuning.md: each shape read from its `config.json`, and counted as
published.

What is computed with such keys is in `test_families.py`, on random weights of smaller shapes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from model.formats.shape_file import shape_from
from model.shapes import hf_names, weight_counts
from settings.precedence import model_presets
from tests.golden.make_published import PUBLISHED

ROOT = Path(__file__).resolve().parents[3]


class Published(NamedTuple):
    """One checkpoint: of whose keys and of which sizes its `config.json` is, and how many weights it has, in millions,
    as published.
    """

    keys: str
    vocab_size: int
    d_model: int
    d_ff: int
    d_kv: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int
    millions: float
    preset: str = ""


CHECKPOINTS = {
    "google-t5/t5-small": Published("t5-small", 32128, 512, 2048, 64, 8, 6, 6, 60.507, "t5-small"),
    "google-t5/t5-base": Published("t5-small", 32128, 768, 3072, 64, 12, 12, 12, 222.904, "t5-base"),
    "google-t5/t5-large": Published("t5-small", 32128, 1024, 4096, 64, 16, 24, 24, 737.668, "t5-large"),
    "google-t5/t5-3b": Published("t5-small", 32128, 1024, 16384, 128, 32, 24, 24, 2851.598, "t5-3b"),
    "google-t5/t5-11b": Published("t5-small", 32128, 1024, 65536, 128, 128, 24, 24, 11307.321, "t5-11b"),
    "google/t5-v1_1-small": Published("t5-v1_1-base", 32128, 512, 1024, 64, 6, 8, 8, 76.961, "t5-v1.1-small"),
    "google/t5-v1_1-base": Published("t5-v1_1-base", 32128, 768, 2048, 64, 12, 12, 12, 247.578, "t5-v1.1-base"),
    "google/t5-v1_1-large": Published("t5-v1_1-base", 32128, 1024, 2816, 64, 16, 24, 24, 783.15, "t5-v1.1-large"),
    "google/t5-v1_1-xl": Published("t5-v1_1-base", 32128, 2048, 5120, 64, 32, 24, 24, 2849.757, "t5-v1.1-3b"),
    "google/t5-v1_1-xxl": Published("t5-v1_1-base", 32128, 4096, 10240, 64, 64, 24, 24, 11135.332, "t5-v1.1-11b"),
    "google/flan-t5-small": Published("flan-t5-base", 32128, 512, 1024, 64, 6, 8, 8, 76.961, "t5-v1.1-small"),
    "google/flan-t5-base": Published("flan-t5-base", 32128, 768, 2048, 64, 12, 12, 12, 247.578, "t5-v1.1-base"),
    "google/flan-t5-large": Published("flan-t5-base", 32128, 1024, 2816, 64, 16, 24, 24, 783.15, "t5-v1.1-large"),
    "google/flan-t5-xl": Published("flan-t5-base", 32128, 2048, 5120, 64, 32, 24, 24, 2849.757, "t5-v1.1-3b"),
    "google/flan-t5-xxl": Published("flan-t5-base", 32128, 4096, 10240, 64, 64, 24, 24, 11135.332, "t5-v1.1-11b"),
    "google/flan-ul2": Published("flan-ul2", 32128, 4096, 16384, 256, 16, 32, 32, 19591.21),
    "google/mt5-small": Published("mt5-small", 250112, 512, 1024, 64, 6, 8, 8, 300.177, "mt5-small"),
    "google/mt5-base": Published("mt5-small", 250112, 768, 2048, 64, 12, 12, 12, 582.401, "mt5-base"),
    "google/mt5-large": Published("mt5-small", 250112, 1024, 2816, 64, 16, 24, 24, 1229.581, "mt5-large"),
    "google/mt5-xl": Published("mt5-small", 250112, 2048, 5120, 64, 32, 24, 24, 3742.62, "mt5-3b"),
    "google/mt5-xxl": Published("mt5-small", 250112, 4096, 10240, 64, 64, 24, 24, 12921.057, "mt5-11b"),
    "google/umt5-small": Published("umt5-small", 256384, 512, 1024, 64, 6, 8, 8, 306.6, "umt5-small"),
    "google/umt5-base": Published("umt5-small", 256384, 768, 2048, 64, 12, 12, 12, 592.0, "umt5-base"),
    "google/umt5-xl": Published("umt5-small", 256384, 2048, 5120, 64, 32, 24, 24, 3768.0, "umt5-3b"),
    "google/umt5-xxl": Published("umt5-small", 256384, 4096, 10240, 64, 64, 24, 24, 12972.0, "umt5-11b"),
    "google/byt5-small": Published("byt5-small", 384, 1472, 3584, 64, 6, 12, 4, 299.638, "byt5-small"),
    "google/byt5-base": Published("byt5-small", 384, 1536, 3968, 64, 12, 18, 6, 581.653, "byt5-base"),
    "google/byt5-large": Published("byt5-small", 384, 1536, 3840, 64, 16, 36, 12, 1228.0, "byt5-large"),
    "google/byt5-xl": Published("byt5-small", 384, 2560, 6720, 64, 32, 36, 12, 3740.0, "byt5-3b"),
    "google/byt5-xxl": Published("byt5-small", 384, 4672, 12352, 64, 64, 36, 12, 12900.0, "byt5-11b"),
    "google/madlad400-3b-mt": Published("madlad400-3b-mt", 256000, 1024, 8192, 128, 16, 32, 32, 2940.0),
    "google/madlad400-7b-mt": Published("madlad400-3b-mt", 256000, 2048, 8192, 128, 16, 48, 48, 8297.0),
    "Salesforce/codet5-small": Published("codet5-base", 32100, 512, 2048, 64, 8, 6, 6, 60.492),
    "Salesforce/codet5-base": Published("codet5-base", 32100, 768, 3072, 64, 12, 12, 12, 222.882),
    "Salesforce/codet5-large": Published("codet5-base", 32100, 1024, 4096, 64, 16, 24, 24, 737.639),
    "Rostlab/prot_t5_xl_uniref50": Published("prot_t5_xl", 128, 1024, 16384, 128, 32, 24, 24, 2818.8),
    "ElnaggarLab/ankh-base": Published("ankh-base", 144, 768, 3072, 64, 12, 48, 24, 736.0),
    "ElnaggarLab/ankh-large": Published("ankh-base", 144, 1536, 3840, 64, 16, 48, 24, 1880.0),
}


class Tensors:
    """The names of a checkpoint's tensors, without its files."""

    file_bytes = 2**50

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def equal(self, first: str, second: str) -> bool:
        return False


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_shapes_are_those_that_were_published(name: str) -> None:
    published = CHECKPOINTS[name]
    sizes = {key: value for key, value in published._asdict().items() if key not in ("keys", "millions", "preset")}
    raw: dict[str, Any] = {**PUBLISHED[published.keys], **sizes}
    head = {"lm_head.weight"} if raw.get("tie_word_embeddings") is False else set()
    layers = {f"decoder.block.{number}.layer" for number in range(200)}  # as many tensors as blocks, at least
    tensors: Any = Tensors({"shared.weight", *head, *layers})
    shape = shape_from(Path(name, "config.json"), raw, tensors)
    assert weight_counts(shape)["total"] / 1e6 == pytest.approx(published.millions, rel=5e-3)
    assert ("lm_head.weight" in hf_names(shape).values()) == bool(head)
    for field, value in model_presets()[published.preset].items() if published.preset else ():
        assert getattr(shape, field) == value, field


def test_the_table_names_what_is_tested_here() -> None:
    page = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf8")
    table = page[page.index("\n| checkpoint | weights |") + 1 :].partition("\n\n")[0]
    assert set(re.findall(r"`([\w-]+/[\w.-]+)`", table)) == set(CHECKPOINTS)
