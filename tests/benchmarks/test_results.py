"""Figures of one class of processor never overwrite another's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.parts import results
from benchmarks.parts.page_order import arranged
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


def test_a_page_of_other_words_keeps_them(tmp_path: Path) -> None:
    page = tmp_path / "reliability.md"
    page.write_text("# Reliability\n\nWhat is promised.\n\n# Figures\n", encoding="utf8")
    for body in ("old", "new"):
        write(page, AVX2, "kills", body)
    text = page.read_text(encoding="utf8")
    assert text.startswith("# Reliability\n\nWhat is promised.\n\n# Figures\n\n<!-- kills on fp32-products -->\n")
    assert text.count("kills on") == 2 and "new" in text and "old" not in text


def test_the_page_has_sections_of_known_classes_alone() -> None:
    text = results.PAGE.read_text(encoding="utf8")
    marks = [line for line in text.splitlines() if line.startswith("<!-- ")]
    folders = {name.replace(" ", "-") for name in CLASSES}
    classes = [mark.removesuffix(" -->").rpartition(" on ")[2] for mark in marks]
    assert classes and all(name in folders or name.startswith(("cuda-", "mps-")) for name in classes)
    for name in ("throughput-t5-small", "contract-accuracy"):
        assert (results.PAGE.parent / "benchmarks" / "fp32-products" / f"{name}.json").is_file()


def test_the_page_answers_in_the_order_a_reader_asks_and_folds_what_is_long(tmp_path: Path) -> None:
    page, long = tmp_path / "benchmarks.md", "\n".join(["| a |", "|---|", *(f"| {row} |" for row in range(30))]) + "\n"
    for name in ("data-reading", "contract-accuracy", "throughput-tiny", "contract-budgets"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processor, "here", lambda *_: AVX2)
            runs = [
                {"system": system, "peak_bytes": size, "tokens_per_second": 9.0}
                for system, size in (("ours-low", 2**20), ("shipped", 2**30))
            ]
            cases = [{"exit": 0, "predicted": 11, "measured": 10}]
            figures = {"contract-accuracy": cases, "throughput-tiny": runs}.get(name, [])
            results.write_section(name, f"About {name}", long, figures, page)
    text = page.read_text(encoding="utf8")
    places = [
        text.index(f"## About {name}")
        for name in ("contract-budgets", "throughput-tiny", "contract-accuracy", "data-reading")
    ]
    assert places == sorted(places) and text.count("<details><summary>all 30 rows") == 4
    assert "| memory | a step of tiny | 1.0 MiB (low) | 1.00 GiB (shipped) | fp32-products |" in text
    assert "median error 10.0%" in text[: text.index("# Memory")]
    assert arranged(text, results.TITLE, tmp_path / "benchmarks") == text


def test_a_recipe_stands_beside_the_peer_that_was_run(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    ours, peer = ({"peak_bytes": size, "seconds": 60.0, "chrf": chrf} for size, chrf in ((2**20, 44.0), (2**30, 12.0)))
    for name, others in (("translate", {"peer_equal_time": peer}), ("alone", {})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processor, "here", lambda *_: AVX2)
            results.write_section(f"recipe-{name}", "A recipe", "", {"ours": ours, **others}, page)
    summary = page.read_text(encoding="utf8")
    assert "| quality | recipe translate, chrf | 44.0 in 1 min | 12.0 in 1 min | fp32-products |" in summary
    assert "recipe alone" not in summary
