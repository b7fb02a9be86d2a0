"""Sound folders of models, runs and caches, for `child` to damage: what comes from others, or from a failing disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from settings.errors import UserError
from settings.loading import load

Maker = Callable[[Path], None]
Reader = Callable[[Path], None]


def tiny_model() -> Any:
    import torch

    from model.t5 import T5
    from settings.declared import T5ModelConfig

    torch.manual_seed(0)
    return T5(T5ModelConfig(vocab_size=40, d_model=8, d_kv=4, d_ff=16, num_heads=2, num_layers=1, num_decoder_layers=1))


# --- models ---


def split_model(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    from model import hf_format

    hf_format.save(tiny_model(), folder)
    whole = folder / "model.safetensors"
    weights, files = load_file(whole), {}
    for number, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, folder / file)
        files.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    whole.unlink()


def int8_model(folder: Path) -> None:
    from model import hf_format
    from model.quantization import quantize_model

    model = tiny_model()
    quantize_model(model)
    hf_format.save(model, folder)


def pickled_model(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from model import hf_format

    hf_format.save(tiny_model(), folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def use_int8(folder: Path) -> None:
    import torch

    from model import hf_format

    hf_format.load(folder, torch.int8)


def use_pickled(folder: Path) -> None:
    from model import hf_format

    hf_format.load(folder, allow_pickle=True)


def use_generation_settings(folder: Path) -> None:
    from commands.new_folder import copy_companions
    from model import hf_format
    from training.saved_model import SavedModel

    made = folder.with_name("mutated.made")
    made.mkdir()
    hf_format.save(tiny_model(), made)
    copy_companions(SavedModel.read(folder), made)


# --- runs ---


def run_folder(folder: Path) -> None:
    """A run with two whole checkpoints, as `output_dir/a`."""
    from model import hf_format
    from model.formats.checksums import seal
    from training.checkpoints.runs import create_run
    from training.report.run_files import SETTINGS_FILE

    config = load("train", {"run_name": "a", "train_file": "a.txt", "max_seq_len": "32", "model_preset": "tiny"})
    run = create_run(folder, "a", "pretrain", fill=lambda place: config.save(place / SETTINGS_FILE))
    model = tiny_model()
    for step in (10, 20):
        place = run / "checkpoints" / f"step_{step:08d}"
        place.mkdir(parents=True)
        hf_format.save(model, place)
        seal(place, best_step=10)
    (run / "owner.json").write_text(json.dumps({"process": 1, "host": "here", "started": 1e9}) + "\n")


def use_settings(folder: Path) -> None:
    from training.setup.resuming import resumed_config

    asked = load("train", {"run_name": "a", "output_dir": str(folder), "is_keep_training": "True"})
    resumed_config(asked, folder / "a")


def use_record(folder: Path) -> None:
    from training.checkpoints.run_lock import RunLock
    from training.checkpoints.runs import read_run, resume_run, runs_newest_first

    for run in runs_newest_first(folder):
        assert run.model_folder is not None or not run.is_finished
    with RunLock() as owner, RunLock() as other:
        owner.acquire(folder / "a")
        assert other.acquire(folder / "a")
    resume_run(folder / "a")
    assert read_run(folder / "a") is None or runs_newest_first(folder)[0].folder == folder / "a"


def use_checkpoints(folder: Path) -> None:
    """The newest one is used only if no byte of it has changed."""
    from training.checkpoints.folder import Checkpoints, step_of
    from training.checkpoints.runs import model_folder, publish

    checkpoints = Checkpoints(folder / "a", keep_latest=1)
    checkpoints.latest(), checkpoints.best(), model_folder(folder / "a")
    content = (folder / "a" / "checkpoints" / "step_00000020" / "model.safetensors").read_bytes()
    sound = (folder / "a" / "checkpoints" / "step_00000010" / "model.safetensors").read_bytes()
    chosen, told = checkpoints.intact()
    assert chosen is not None and (step_of(chosen) == 20) == (not told)
    assert step_of(chosen) == 10 or content == sound, "a damaged checkpoint was taken"
    publish(chosen, folder / "a")
    if told:
        raise UserError(*told)


def metrics_file(path: Path) -> None:
    lines = [{"event": "step", "step": step, "loss": 2.0} for step in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def use_metrics(path: Path) -> None:
    from training.report.log_files import MetricsFile

    metrics = MetricsFile(path, keep_until=5)
    metrics.write({"event": "end"})
    metrics.close()


# --- caches, and what else lies about ---


def speeds_file(path: Path) -> None:
    entry = {"processor": "p", "threads": 2, "rates": {"float32": 1e11}, "date": "2026-01-01"}
    path.write_text(json.dumps({"cpu: p": entry}))


def use_speeds(path: Path) -> None:
    from unittest import mock

    from devices import machine_file

    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(path.with_name("cache"))}):
        location = machine_file.location()
        location.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, location)
        measured = machine_file.read("cpu: p")
        if measured is not None:
            measured.rates_with(3)
        machine_file.keep("cpu: q", "q", 1, {"float32": 1.0})
        assert machine_file.read("cpu: q") is not None


def target_file(path: Path) -> None:
    path.write_text("available: 8G\nbase: 300M\nrates:\n  float32: 1e11\n  bfloat16: 2e11\n")


def use_target(path: Path) -> None:
    from memory.machines import target_machine

    target_machine(str(path))


def probe_file(path: Path) -> None:
    from memory.probe import ProbeResult, write_result

    write_result(path, ProbeResult(2**28, {"step": 2**29, "save": 2**28}, 1.5))


def use_probe(path: Path) -> None:
    from memory.probe import correction_of, read_result

    result = read_result(path)
    if result is not None:
        correction_of(result, {"step": {"weights": 2**20}, "save": {"weights": 2**20}})


def reference_folder(folder: Path) -> None:
    from training.setup.dpo_reference import ReferenceStore

    ReferenceStore(folder / "train.npy", 40).write(np.arange(40), np.ones((40, 2), np.float32))
    (folder / "reference.json").write_text(json.dumps({"folder": "/cache/reference-0123456789abcdef", "model": "01"}))


def use_reference(folder: Path) -> None:
    from training.setup.dpo_reference import ReferenceStore, _read_record

    _read_record(folder / "reference.json")
    store = ReferenceStore(folder / "train.npy", 40)
    store.unknown()
    np.asarray(store.read()).sum()


def digests_folder(folder: Path) -> None:
    from support.storage import Parts

    with Parts(folder, "of this work", ".bin").write(0, {"source": 1}) as path:
        path.write_bytes(bytes(8))


def use_digests(folder: Path) -> None:
    from support.storage import OtherParts, Parts

    with suppress(OtherParts):
        list(Parts(folder, "of this work", ".bin"))


KINDS: dict[str, tuple[Maker, Reader, str]] = {
    "index": (split_model, use_pickled, "model.safetensors.index.json"),
    "part": (split_model, use_pickled, "model-00002-of-00002.safetensors"),
    "int8": (int8_model, use_int8, "model.int8.safetensors"),
    "pickled": (pickled_model, use_pickled, "pytorch_model.bin"),
    "generation": (int8_model, use_generation_settings, "generation_config.json"),
    "run settings": (run_folder, use_settings, "a/settings.json"),
    "run record": (run_folder, use_record, "a/run.json"),
    "owner": (run_folder, use_record, "a/owner.json"),
    "sums": (run_folder, use_checkpoints, "a/checkpoints/step_00000020/checksums.json"),
    "checkpoint": (run_folder, use_checkpoints, "a/checkpoints/step_00000020/model.safetensors"),
    "metrics.jsonl": (metrics_file, use_metrics, ""),
    "speeds.json": (speeds_file, use_speeds, ""),
    "target.yaml": (target_file, use_target, ""),
    "probe.json": (probe_file, use_probe, ""),
    "reference": (reference_folder, use_reference, "reference.json"),
    "reference store": (reference_folder, use_reference, "train.npy"),
    "digests": (digests_folder, use_digests, "parts.jsonl"),
}
