"""A run publishes the mean of its last checkpoints where that is better than the best of them, and goes on from the
last.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import training.averaging as averaging
from tests.end_to_end.running import write_text
from tests.training.small_runs import configuration, events
from trainer_low_mem import LowMemTrainer

FLAGS = {
    "max_steps": 4,
    "save_steps": 1,
    "keep_latest_n_ckp": 4,
    "lr_schedule": "constant",
    "warmup_steps": 1,
    "dropout_rate": 0.0,
}


def run(folder: Path, name: str, **flags: object) -> dict[str, torch.Tensor]:
    LowMemTrainer(configuration(folder, name, **{**FLAGS, **flags})).train()
    return load_file(folder / "runs" / name / "model.safetensors")


def mean_of(folder: Path, name: str) -> dict[str, torch.Tensor]:
    files = sorted((folder / "runs" / name / "checkpoints").glob("step_*/model.safetensors"))
    parts = [load_file(file) for file in files]
    return {key: torch.stack([part[key].double() for part in parts]).mean(0) for key in parts[0]}


def test_the_better_one_is_published_and_the_run_goes_on_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "text.txt")
    evaluate = averaging.evaluate
    monkeypatch.setattr(averaging, "evaluate", lambda live, averaged=0: evaluate(live, averaged) or True)
    published = run(tmp_path, "mean", average_checkpoints=4, eval_steps=2)
    evaluations = [(each["step"], each.get("averaged_checkpoints")) for each in events(tmp_path, "mean", "eval")]
    assert evaluations == [(0, None), (2, None), (4, None), (4, 4)]
    for name, exact in mean_of(tmp_path, "mean").items():
        torch.testing.assert_close(published[name].double(), exact, rtol=1e-5, atol=1e-8)
    names = sorted(path.name for path in (tmp_path / "runs/mean/checkpoints").iterdir())
    assert names == ["best", "latest", *(f"step_0000000{step}" for step in (1, 2, 3, 4))]
    run(tmp_path, "mean", is_keep_training=True, max_steps=5, average_checkpoints=0)
    run(tmp_path, "whole", max_steps=5)
    parts, whole = ([(e["step"], e["loss"]) for e in events(tmp_path, name, "step")] for name in ("mean", "whole"))
    assert parts == whole
