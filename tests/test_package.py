"""The wheel holds the whole program below one package, and trains where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from settings.help import VERSION

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
# of the tree, in no wheel
LEFT_OUT = {"tests", "benchmarks", "docs", "frugalt5", "setup.py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_program_below_one_name(wheel: Path) -> None:
    assert wheel.name.startswith(f"frugalt5-{VERSION}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"frugalt5"}
    modules = [path.relative_to(ROOT) for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py"))]
    wanted = {
        f"frugalt5/_program/{path}" for path in modules if path.parts[0] not in LEFT_OUT and "cache" not in path.parts
    }
    beside = ("board/static/main.js", "devices/kernels/common.h", "languages/zh.yaml", "presets/models.yaml",
              "settings/aliases.yaml", "docs/settings.schema.json")  # fmt: skip
    wanted |= {f"frugalt5/_program/{path}" for path in beside}
    assert not wanted - names


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="programs lie elsewhere")
def test_it_trains_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    bin, python = tmp_path / "env" / "bin", tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", f"--python={python}", "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    (site,) = (tmp_path / "env").glob("lib/*/site-packages")
    (site / "torch_and_others.pth").write_text(sysconfig.get_path("purelib"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 40)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{bin}:{environment['PATH']}"

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    flags = ("--is_finetune=True", "--train_file=pairs.jsonl", "--tokenizer_type=byte", "--run_name=first", "--max_steps=2",
             "--max_seq_len=16", "--device=cpu", "--memory_budget=2G", "--probe=False")  # fmt: skip
    told = run("frugalt5", "train", *flags)
    assert "  frugalt5 generate --model=model_save/first" in told and "train_low_mem.py" not in told
    goes_on = 'load("train", {"is_keep_training": True, "max_steps": 3})'
    run(
        str(python),
        "-c",
        f"from frugalt5 import LowMemTrainer, load; assert LowMemTrainer({goes_on}).train().steps == 3",
    )
    assert "first" in run(str(python), "-m", "frugalt5", "runs")
    assert {path.name for path in work.iterdir()} == {"pairs.jsonl", "data", "logs", "model_save"}
    assert {path.name for path in site.iterdir() if not path.name.startswith("frugalt5-")} == {
        "frugalt5",
        "torch_and_others.pth",
    }
    assert not list((site / "frugalt5").rglob("logs"))
