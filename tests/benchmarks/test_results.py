"""Figures of one class of processor never overwrite another's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.parts import results
from devices import processor
from devices.processor import AVX2, AVX512_BF16, CLASSES, Processor


def write(page: Path, kind: Processor, name: str, body: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "here", lambda *_: kind)
        results.write_section(name, "Speed", body, {"body": body}, page)


def test_each_class_has_its_own_table_and_figures(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    for kind, name, body in (
        (AVX2, "speed", "old"), (AVX2, "memory", "other"), (AVX512_BF16, "speed", "wide"), (AVX2, "speed", "new"),
    ):  # fmt: skip
        write(page, kind, name, body)
    text = page.read_text(encoding="utf8")
    assert "old" not in text and text.index("new") < text.index("wide") < text.index("other"), "one benchmark together"
    assert "## Speed (fp32 products)" in text and "## Speed (avx512_bf16)" in text
    for folder, body in (("fp32-products", "new"), ("avx512_bf16", "wide")):
        assert json.loads((tmp_path / "benchmarks" / folder / "speed.json").read_text())["figures"] == {"body": body}


def test_the_page_has_sections_of_known_classes_alone() -> None:
    text = results.PAGE.read_text(encoding="utf8")
    marks = [line for line in text.splitlines() if line.startswith("<!-- ")]
    folders = {name.replace(" ", "-") for name in CLASSES}
    assert marks and all(mark.removesuffix(" -->").rpartition(" on ")[2] in folders for mark in marks)
    for name in ("throughput-t5-small", "contract-accuracy"):
        assert (results.PAGE.parent / "benchmarks" / "fp32-products" / f"{name}.json").is_file()
