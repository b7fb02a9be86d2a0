"""The notebooks are those that their script makes, and they run: the ones for Colab and Kaggle twice, the second time
in a new session.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from settings.help import VERSION
from tests.fake_hub import running

DOCS = Path(__file__).resolve().parent.parent / "docs"
# what the services' own packages do, as far as the notebooks use them
STAND_INS = {
    f"frugalt5-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: frugalt5\nVersion: {VERSION}\n",
    "google/colab/drive.py": "def mount(folder):\n    pass\n",
    "kagglehub.py": """
import shutil
from pathlib import Path

STORE = Path(__file__).parent / "datasets"

def dataset_upload(handle, folder, version_notes):
    shutil.rmtree(STORE / handle, ignore_errors=True)
    shutil.copytree(folder, STORE / handle, ignore=links)

def links(folder, names):
    return [name for name in names if Path(folder, name).is_symlink()]

def dataset_download(handle):
    return str(STORE / handle)
""",
}


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


def committed(name: str) -> list[Any]:
    content: list[Any] = json.loads((DOCS / f"{name}.ipynb").read_text(encoding="utf8"))["cells"]
    return content


def test_they_are_the_ones_that_are_made(script: ModuleType) -> None:
    for name in script.NOTEBOOKS:
        sources = [cell["source"] for cell in script.notebook(name).cells]
        assert sources == ["".join(cell["source"]) for cell in committed(name)], "run: python docs/make_notebook.py"
    shown = [kind for parts in kinds(committed("notebook")) for kind in parts]
    assert "stream" in shown and any("image/png" in kind for kind in shown) and "error" not in shown
    assert "/tmp" not in json.dumps(committed("notebook"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["colab", "kaggle"])
def test_a_new_session_goes_on_from_what_the_service_kept(
    name: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    from tests.training.small_trained import save_trained

    for file, content in STAND_INS.items():
        path = tmp_path / "packages" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), str(DOCS.parent)]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with running(tmp_path / "hub", monkeypatch) as hub:
        save_trained(hub.repository("google/flan-t5-base"))
        rows = "".join(f"{n},A: Are you number {n}? B: I am.,B is number {n}.\n" for n in range(300))
        (hub.repository("knkarthick/dialogsum", "datasets") / "train.csv").write_text(f"id,dialogue,summary\n{rows}")
        texts = []
        for number, steps in enumerate((2, 4)):
            made, session = script.notebook(name), tmp_path / f"session{number}"
            session.mkdir()
            runs = tmp_path / "drive" if name == "colab" else session / "model_save"
            changed = f"STEPS = {steps}\nFOLDER = '{runs}'\nCONTINUE = {number == 1}"
            made.cells.insert(2, nbformat.v4.new_code_cell(changed))
            done = script.execute(made, session)
            texts.append("".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", [])))
            assert (runs / "flan" / "checkpoints" / f"step_{steps:08}").is_dir(), texts[-1]
    metrics = [json.loads(line) for line in (session / "logs" / "flan" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["event"] == "step"] == [3, 4]
    assert "advice" in texts[0] and "rouge" in texts[1].lower()
