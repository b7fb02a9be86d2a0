"""The example notebook shows what happens: it is the one that its script makes, and it still runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("nbformat")
    spec = importlib.util.spec_from_file_location("make_notebook", DOCS / "make_notebook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kinds(cells: list[Any]) -> list[list[str]]:
    """What each cell shows: the kinds of its outputs, and of what is displayed."""
    shown = [
        [output.get("data", {}).keys() or output["output_type"] for output in cell.get("outputs", [])] for cell in cells
    ]
    return [sorted("+".join(sorted(part)) if not isinstance(part, str) else part for part in parts) for parts in shown]


def committed() -> list[Any]:
    content: list[Any] = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf8"))["cells"]
    return content


def test_it_is_the_one_that_is_made(script: ModuleType) -> None:
    sources = [cell["source"] for cell in script.notebook().cells]
    assert sources == ["".join(cell["source"]) for cell in committed()], "run: python docs/make_notebook.py"
    shown = [kind for parts in kinds(committed()) for kind in parts]
    assert "stream" in shown and any("image/png" in kind for kind in shown) and "error" not in shown
    assert "/tmp" not in json.dumps(committed())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_runs(script: ModuleType) -> None:
    pytest.importorskip("nbclient")
    done = script.execute(script.notebook())
    assert kinds(done.cells) == kinds(committed())
    (losses,) = [cell.outputs[0]["text"] for cell in done.cells if "callbacks=[say]" in cell.source]
    assert losses.startswith("step  0: evaluation loss 6.") and "step 60:" in losses
