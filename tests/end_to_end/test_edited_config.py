"""`config.py` edited as guides print it, in a copy of the program: plan, training and finetuning use the edited
values.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model.shapes import weight_counts
from settings.loading import load
from tests.end_to_end.running import ENVIRONMENT, ROOT, Run
from tests.end_to_end.world import World

PASTED = """

class TrainConfig:
    batch_size_per_gpu = 1
    gradient_accumulation_steps = 3
    max_seq_len = 48
    mixed_precision = 'fp16'

class T5ModelConfig:
    d_model = 48
    d_kv = 16
    d_ff = 64
    num_layers = 1
    num_heads = 3
"""
COMMENTS_ALONE = "\n\nclass T5ModelConfig:\n    # 使用默认配置\n"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program's files, without tests and documentation."""
    folder = tmp_path_factory.mktemp("copy") / "program"
    skipped = shutil.ignore_patterns(".*", "tests", "docs", "benchmarks", "__pycache__", "model_save", "cache", "files")
    shutil.copytree(ROOT, folder, ignore=skipped)
    return folder


@pytest.fixture
def edited(copied: Path) -> Path:
    """The program with classes pasted at the end of `config.py`."""
    (copied / "config.py").write_text((ROOT / "config.py").read_text("utf8") + PASTED + COMMENTS_ALONE, "utf8")
    return copied


def command(program: Path, name: str, *flags: str) -> Run:
    words = [sys.executable, str(program / "train_low_mem.py"), name, *flags]
    return subprocess.run(words, cwd=program.parent, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_an_edited_model_is_planned_and_trained(edited: Path, world: World) -> None:
    data = [f"--train_file={world.text}", "--vocab_size=512", "--max_steps=2"]
    planned = command(edited, "plan", *folders(edited, world), *data)
    assert planned.returncode == 0, planned.stderr
    shape = {"d_model": 48, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 3, "vocab_size": 512}
    weights = weight_counts(load("train", {**shape, "train_file": "x"}).model)["total"]
    assert f" {weights:,}," in planned.stdout, "the parameters of the edited shape"
    train(edited, world, "text", *data)
    resumed = command(edited, "plan", "--is_keep_training=True", "--run_name=text", *folders(edited, world))
    assert resumed.returncode == 0, resumed.stderr
    assert "keeps its own settings" in resumed.stderr and "edited: " not in resumed.stderr


def folders(program: Path, world: World) -> list[str]:
    """The flags for folders beside a copy of the program."""
    beside = program.parent
    return [f"--output_dir={beside / 'runs'}", f"--log_dir={beside / 'logs'}", f"--cache_dir={world.place.cache}"]


def train(program: Path, world: World, run_name: str, *flags: str) -> None:
    """Train a model of the edited shape."""
    done = command(program, "train", *folders(program, world), *flags, "--vocab_size=512", f"--run_name={run_name}")
    assert done.returncode == 0, done.stderr
    assert "d_model = 48" in done.stderr and "config.py:" in done.stderr
    run = program.parent / "runs" / run_name
    shape = json.loads((run / "config.json").read_text("utf8"))
    sizes = [shape[name] for name in ("d_model", "d_ff", "num_layers", "num_decoder_layers", "num_heads")]
    assert sizes == [48, 64, 1, 1, 3]
    record = json.loads((run / "settings.json").read_text("utf8"))
    assert (record["batch_size_per_gpu"], record["max_seq_len"]) == (1, 48)


def test_help_shows_an_edited_value_and_a_line_that_cannot_act_is_refused(copied: Path) -> None:
    shipped = (ROOT / "config.py").read_text("utf8")
    (copied / "config.py").write_text(shipped.replace("d_model = 512", "d_model = 384"), "utf8")
    assert "384" in command(copied, "train", "--help=all").stdout
    (copied / "config.py").write_text(f"{shipped}\n\nclass TrainConfig:\n    learn_rate = 1e-4\n", "utf8")
    number = len(shipped.splitlines()) + 4
    for name in ("plan", "train", "runs"):
        refused = command(copied, name)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr
        assert f"config.py line {number}" in refused.stderr and "learn_rate" in refused.stderr
