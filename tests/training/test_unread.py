"""What a run was told and nobody has read is said once, before its first step; nothing that has an effect is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from settings.declared import Config
from settings.loading import load
from settings.precedence import PRESETS_DIR, read_settings_file, run_presets
from tests.end_to_end.running import write_pairs, write_text
from tests.training.small_runs import SMALL, configuration
from trainer_low_mem import LowMemTrainer

NOTE = ", has no effect on this run"


def test_what_nobody_has_read_is_said_once(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    flags = {"max_steps": 1, "allow_download": True, "weight_decay": 0.1, "repetition_penalty": 1.2, "dedup": "exact"}
    LowMemTrainer(configuration(tmp_path, "told", **flags)).train()
    (log,) = (tmp_path / "logs").glob("*.log")
    told = [line for line in log.read_text("utf8").splitlines() if NOTE in line]
    assert [line.split("--")[-1].split(" = ")[0] for line in told] == ["allow_download"]


INSTEAD = {
    "num_decoder_layers": "head",
    "effective_batch_size": "batch_size_per_gpu",
    "max_steps": "epochs",
    "max_seq_len": "max_seq_len",
}


TINY = {
    **SMALL,
    "max_steps": 1,
    "memory_budget": "2G",
    "d_kv": 16,
    "mixed_precision": "auto",
    "finetune_from": "none",
    "warmup_steps": 0,
    "vocab_size": 700,
}


def notes(folder: Path, config: Config) -> list[str]:
    """Settings of which a run says that nobody has read them."""
    LowMemTrainer(config).train()
    (log,) = (folder / "logs").glob("*.log")
    return [line.split("--")[-1].split(" = ")[0] for line in log.read_text("utf8").splitlines() if NOTE in line]


def data_of(preset: dict[str, object], folder: Path) -> str:
    """Files with a few rows of the kind that a preset trains on, as many as it weights."""
    text, label = str(preset.get("text_column", "text")), str(preset.get("label_column", "label"))
    path = folder / "rows.jsonl"
    if preset.get("head") == "embedding" and "teacher_vectors" not in preset:
        rows = [{"sentence1": f"number {number}", "sentence2": "a number", "score": "0.5"} for number in range(120)]
    elif preset.get("head") == "token":
        rows = [{text: "ABAB", label: "HEHE"}] * 120
    elif preset.get("labels") == "regression":
        rows = [{text: f"number {number}", label: str(number / 7)} for number in range(120)]
    else:
        rows = [{text: f"number {number}", label: ["negative", "positive"][number % 2]} for number in range(120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    if "head" not in preset and (preset.get("is_finetune") or preset.get("objective") == "pairs"):
        write_pairs(path)
    elif "head" not in preset:
        path = write_text(folder / "rows.txt")
    weights = str(preset.get("mixture_weights", "1")).split(",")
    parts = [path, *(Path(shutil.copy(path, path.with_stem(f"part{number}"))) for number in range(1, len(weights)))]
    return ",".join(map(str, parts))


@pytest.mark.slow
@pytest.mark.parametrize("name", run_presets())
def test_nothing_in_a_preset_is_in_vain(tmp_path: Path, name: str) -> None:
    preset = read_settings_file(PRESETS_DIR / f"{name}.yaml")
    tiny = {key: value for key, value in TINY.items() if INSTEAD.get(key) not in preset}
    tiny |= {"epochs": 0.01} if "epochs" in preset else {}
    folders = {"output_dir": tmp_path / "runs", "log_dir": tmp_path / "logs", "cache_dir": tmp_path / "cache"}
    data = {"train_file": data_of(preset, tmp_path), "validation_file": "none"}
    data |= {"answers": data["train_file"]} if "answers" in preset else {}
    if "teacher_vectors" in preset:
        data["teacher_vectors"] = str(tmp_path / "vectors.npy")
        size = int(str(preset["embedding_size"]))
        pairs = tmp_path / "pairs.jsonl"
        pairs.write_text(json.dumps({"anchor": "a number", "positive": "number 7"}) + "\n")
        data["validation_file"] = str(pairs)
        np.save(data["teacher_vectors"], np.random.default_rng(0).standard_normal((120, size)).astype(np.float32))
    flags = {"config": PRESETS_DIR / f"{name}.yaml", **tiny, **folders, **data, "run_name": "tiny"}
    assert notes(tmp_path, load("train", {key: str(value) for key, value in flags.items()})) == []
