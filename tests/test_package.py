"""Installed, every module lies below one package, beside modules of the user's own, and the program trains there."""

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
from settings.program import IN_VENV

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
# of the tree, in no wheel
LEFT_OUT = {"tests", "benchmarks", "docs", "frugalt5", "setup.py"}
# a process with modules of its own whose names are those of a checkout, imported before or after
THEIRS = "import config, data.rows, model"
OURS = """import frugalt5.data.dataset
from frugalt5 import load, UserError
from frugalt5.support.child_process import call"""
BESIDE = """
import sys
path = list(sys.path)
{first}
{second}
assert [config.NAME, data.NAME, data.rows.NAME, model.NAME] == ["config", "data", "data/rows", "model"]
assert sys.modules["config"] is config and config.__file__.startswith({folder!r})
assert load("train", {{"max_steps": "7"}}).train.max_steps == 7
assert call("settings.loading:training_command", {{}}) == "train"
try:
    call(load, "trian")
except UserError as error:
    assert error.problems
assert sys.path == path
assert {{"LowMemTrainer", "Model", "UserError", "data", "load", "memory", "model", "plot"}} <= {{*dir(frugalt5)}}
"""


def build(hook: str, folder: Path) -> Path:
    """What pip installs: a wheel, built by a hook of setuptools."""
    words = [sys.executable, "-c", BUILD, hook, str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


def environment(folder: Path) -> tuple[Path, Path]:
    """A new environment with torch and the other packages: its Python, and the folder of its packages."""
    venv.create(folder, with_pip=False)
    (site,) = folder.rglob("site-packages")
    (site / "torch_and_others.pth").write_text(sysconfig.get_path("purelib"))
    return folder.joinpath(*IN_VENV.parts[1:]), site


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_modules_of_the_users_own_stay_theirs(hook: str, wheel: Path, tmp_path: Path) -> None:
    python, site = environment(tmp_path / "env")
    file = wheel if hook == "build_wheel" else build(hook, tmp_path)
    zipfile.ZipFile(file).extractall(site)  # as pip does, but for the command
    work = tmp_path / "work"
    for name in ("config.py", "data/__init__.py", "data/rows.py", "model/__init__.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(f"NAME = {name.removesuffix('.py').removesuffix('/__init__')!r}\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for first, second in ((THEIRS, OURS), (OURS, THEIRS)):
        words = [str(python), "-c", BESIDE.format(first=first, second=second, folder=str(work))]
        done = subprocess.run(words, cwd=work, env=variables, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_program_below_one_name(wheel: Path) -> None:
    assert wheel.name.startswith(f"frugalt5-{VERSION}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"frugalt5"}
    modules = [path.relative_to(ROOT) for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py"))]
    wanted = {f"frugalt5/{path}" for path in modules if path.parts[0] not in LEFT_OUT and "cache" not in path.parts}
    beside = (
        "board/static/main.js",
        "commands/exporting/page.html",
        "devices/kernels/common.h",
        "languages/zh.yaml",
        "presets/models.yaml",
        "settings/aliases.yaml",
    )
    wanted |= {f"frugalt5/{path}" for path in beside}
    assert not wanted - names and "frugalt5/setup.py" not in names


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="programs lie elsewhere")
def test_it_trains_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    python, site = environment(tmp_path / "env")
    install = [sys.executable, "-m", "pip", f"--python={python}", "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    work = tmp_path / "work"
    work.mkdir()
    (work / "pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 40)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PATH"] = f"{python.parent}:{variables['PATH']}"

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=work, env=variables, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    flags = (
        "--is_finetune=True",
        "--train_file=pairs.jsonl",
        "--tokenizer_type=byte",
        "--run_name=first",
        "--max_steps=2",
        "--max_seq_len=16",
        "--device=cpu",
        "--memory_budget=2G",
        "--probe=False",
    )
    told = run("frugalt5", "train", *flags)
    assert "  frugalt5 generate --model=model_save/first" in told and "train_low_mem.py" not in told
    goes_on = 'load("train", {"is_keep_training": True, "max_steps": 3})'
    run(
        str(python),
        "-c",
        f"from frugalt5 import LowMemTrainer, load; assert LowMemTrainer({goes_on}).train().steps == 3",
    )
    launcher = (str(python), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "frugalt5")
    run(*launcher, "train", *flags, "--run_name=two", "--effective_batch_size=4")
    listing = run(str(python), "-m", "frugalt5", "runs")
    assert "first" in listing and "two" in listing
    assert {path.name for path in work.iterdir()} == {"pairs.jsonl", "data", "logs", "model_save"}
    assert {path.name for path in site.iterdir() if not path.name.startswith("frugalt5-")} == {
        "frugalt5",
        "torch_and_others.pth",
    }
    assert not list((site / "frugalt5").rglob("logs"))
