"""Windows has no fork, no fcntl, no /proc, no glibc: the program runs without them, told by children that lack them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.running import write_text

ROOT = Path(__file__).resolve().parent.parent.parent
HEAD = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.devices.like_windows import become_windows
become_windows()
"""
# These load onnxruntime, and that of this system does not load there.
IMPORT_ALL = """
import importlib, pkgutil
elsewhere = ("data.cache.", "commands.exporting.onnx_", "commands.exporting.held_out", "commands.exporting.web_page")
for tree in ("settings", "devices", "memory", "data", "model", "engine", "training", "commands"):
    for module in pkgutil.walk_packages(importlib.import_module(tree).__path__, tree + "."):
        if not module.name.startswith(elsewhere):
            importlib.import_module(module.name)
import train_low_mem, trainer_low_mem
"""
FIGURES = """
import json, os
from pathlib import Path
import devices
from devices.environment import prepare_environment
from devices.malloc import trim_malloc, tune_malloc
from memory.budget import measure_budget
from memory.cleanup import clean_all
from memory.processes import ProcessTree, has_proc, usage_of
from training.probing import peak_bytes
from commands.diagnosis.inventory import take_inventory

device = devices.pick()
budget = measure_budget("auto", device)
clean_all(device)
facts = take_inventory(Path("runs"))
print(json.dumps({
    "proc": has_proc(), "malloc": [tune_malloc("small"), trim_malloc()],
    "limits": [limit.what for limit in budget.limits],
    "budget": budget.host_bytes, "usage": usage_of([os.getpid()]).anon_bytes, "tree": ProcessTree().usage().anon_bytes,
    "peak": peak_bytes(), "load": facts["system"]["load"], "read": facts["disk"]["read_rate"],
    "set": sorted(prepare_environment({})), "device": device.name,
}))
"""
TRAIN = """
import train_low_mem
sys.exit(train_low_mem.main(sys.argv[1:]))
"""
SMALL = (
    "--d_model=16 --d_kv=8 --d_ff=32 --num_heads=2 --num_layers=1 --num_decoder_layers=1 --vocab_size=400 "
    "--max_seq_len=32 --max_steps=2 --effective_batch_size=2 --mixed_precision=no --sample_rows=0 "
    "--device=cpu"
)


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, "-c", HEAD + program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_module_is_imported_and_every_figure_has_another_source(tmp_path: Path) -> None:
    done = run(tmp_path, IMPORT_ALL + FIGURES)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["proc"] is False and figures["malloc"] == [False, False] and figures["device"] == "cpu"
    assert figures["limits"] == ["available RAM"] and figures["budget"] > 0
    assert 0 < figures["usage"] <= figures["peak"] and figures["tree"] >= 0.5 * figures["usage"]
    assert figures["load"] is None and figures["read"] is None
    assert set(figures["set"]) == {"ARROW_DEFAULT_MEMORY_POOL", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}


@pytest.mark.slow
def test_a_run_trains_saves_and_resumes(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    flags = ("--run_name=one", "--save_steps=1", "--train_file=text.txt", *SMALL.split())
    done = run(tmp_path, TRAIN, "train", *flags)
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "model_save/one/model.safetensors").stat().st_size > 1000
    again = run(tmp_path, TRAIN, "train", "--is_keep_training=True", "--run_name=one", "--max_steps=3", "--device=cpu")
    assert again.returncode == 0, again.stderr + again.stdout
    events = [json.loads(line) for line in (tmp_path / "logs/one/metrics.jsonl").read_text("utf8").splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    assert all(event["anon_bytes"] > 0 for event in events if event["event"] == "memory")
