"""Reference log-probabilities: right, computed once and only for rows that are seen, and never those of another
model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.step import to_micro_batch
from memory.estimate.workload import ExecutionPlan
from model import hf_format
from model.lora.adapter import adapters_of
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load
from tests.training.setups import resolved
from tests.training.small_trained import save_trained
from training.checkpoints.runs import create_run
from training.setup.build import build
from training.setup.dpo_reference import LEFT_OUT, RECORD, attach_reference
from training.setup.resolved import ResolvedRun

CHOICE = ExecutionPlan(4, 1, 1, 3, 3, "float32", "float32", 1 << 20)
BATCH = 4
Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Settings of a preference run under the test's folder, from a model and data that are there."""
    save_trained(tmp_path / "base")
    path = tmp_path / "preferences.jsonl"
    rows = [{"prompt": f"is it {n}?", "chosen": f"yes, {n}", "rejected": "no" * (1 + n % 4)} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**flags: object) -> Config:
        settings = {
            "train_file": path,
            "finetune_from": tmp_path / "base",
            "output_dir": tmp_path / "runs",
            "run_name": "run",
            "cache_dir": tmp_path / "cache",
            "max_seq_len": 32,
            "max_steps": 3,
            "eval_rows": 2,
            "mixed_precision": "no",
            "device": "cpu",
            **flags,
        }
        return load("dpo", {name: str(value) for name, value in settings.items()})

    return make


def begun(config: Config) -> ResolvedRun:
    """A run whose folder exists, and nothing else."""
    run = resolved(config, CHOICE, BATCH)
    create_run(config.run.output_dir, config.run.run_name, "dpo", overwrite=True)
    return run


def attach(run: ResolvedRun) -> list[str]:
    """Attach, and give what was told."""
    messages: list[str] = []
    attach_reference(run, messages.append)
    return messages


def stores(tmp_path: Path) -> dict[str, np.ndarray]:
    return {path.stem: np.load(path) for path in (tmp_path / "cache").glob("reference-*/*.npy")}


def test_they_are_those_of_the_model_and_only_of_rows_that_are_seen(configure: Configure, tmp_path: Path) -> None:
    begin = begun(configure())
    messages = attach(begin)
    assert [line.split(":")[0].split(" of ")[-1] for line in messages] == ["train rows", "validation rows"]
    model = hf_format.load(tmp_path / "base")
    read_rows = set(begin.loader.rows_of_steps(np.arange(3 + LEFT_OUT), BATCH).ravel().tolist())
    values = begin.loader.reference
    assert values is not None and values.shape == (begin.loader.num_rows, 2)
    assert (
        set(np.flatnonzero(~np.isnan(values).any(1)).tolist()) == read_rows and len(read_rows) < begin.loader.num_rows
    )
    for row in read_rows:
        batch = begin.loader.batch_of(np.array([row]))
        prompt = torch.from_numpy(batch.input_ids[:, : batch.input_lengths[0]])
        for side in (0, 1):
            labels = torch.from_numpy(batch.labels[side : side + 1, : batch.target_lengths[side]])
            logits = model.logits(prompt, model.shift_right(labels)).double()
            expected = logits.log_softmax(-1).gather(2, labels[..., None]).sum()
            assert values[row, side] == pytest.approx(expected.item(), rel=1e-5)


def test_what_is_stored_is_not_computed_again(configure: Configure, tmp_path: Path) -> None:
    begin = begun(configure())
    attach(begin)
    before = stores(tmp_path)
    again = begun(configure(run_name="other"))
    assert attach(again) == [], "the same model and the same data"
    (file,) = (tmp_path / "cache").glob("reference-*/train.npy")
    content = file.read_bytes()
    file.unlink()  # Another run may have mapped it.
    file.write_bytes(content[:-9])
    lines = attach(again)
    assert lines[0] == f"{file}: is damaged, it is made anew" and len(lines) == 2
    assert np.array_equal(before["train"], stores(tmp_path)["train"], equal_nan=True)
    attach(begun(configure(run_name="longer", max_steps=8)))
    after = stores(tmp_path)["train"]
    is_known = ~np.isnan(before["train"])
    assert np.array_equal(before["train"][is_known], after[is_known]) and np.isnan(after).sum() < (~is_known).sum()


def test_adapters_need_no_stored_reference(configure: Configure, tmp_path: Path) -> None:
    """Without its adapters the model is its own reference."""
    begin = begun(configure(lora_rank=4))
    assert attach(begin) == [] and not stores(tmp_path)
    engine = build(begin, CHOICE)
    for adapter in adapters_of(engine.model).values():
        adapter.b.data.normal_()
    full = begun(configure(run_name="full"))
    attach(full)
    (batch,) = full.loader.micro_batches(0, effective_batch_size=BATCH, batch_size=BATCH)
    part = to_micro_batch(batch, engine.model.config, torch.device("cpu"))
    unanswered = dataclasses.replace(part, reference=None)
    (completed,) = engine.blockwise.objective.complete([unanswered], engine.blockwise.token_losses)
    assert part.reference is not None and completed.reference is not None
    assert completed.reference.tolist() == pytest.approx(part.reference.tolist(), rel=1e-5)


def test_a_resumed_run_reads_what_it_began_with_or_refuses(configure: Configure, tmp_path: Path) -> None:
    begin = begun(configure())
    attach(begin)
    begin = dataclasses.replace(begin, config=begin.config.with_changes(is_keep_training=True))
    save_trained(tmp_path / "base", seed=9)  # changed in place: what is stored is still the reference
    assert attach(begin) == []
    (folder,) = (tmp_path / "cache").glob("reference-*")
    assert json.loads((begin.run_dir / RECORD).read_text())["folder"] == folder.name, "the same wherever the cache lies"
    (folder / "train.npy").unlink()
    with pytest.raises(UserError, match="is not the model any more"):
        attach(begin)
    save_trained(tmp_path / "base")  # The model is as it was.
    assert len(attach(begin)) == 1


def test_rows_that_have_changed_are_asked_anew_of_the_same_model(configure: Configure, tmp_path: Path) -> None:
    config = configure()
    old = begun(config)
    attach(old)
    before = json.loads((old.run_dir / RECORD).read_text())
    path = Path(str(config.data.train_file))
    path.write_text(path.read_text().replace("yes,", "no,"))
    fresh = resolved(config, CHOICE, BATCH)
    fresh = dataclasses.replace(fresh, config=fresh.config.with_changes(is_keep_training=True))
    assert attach(fresh), "else they would be those of other rows"
    now = json.loads((old.run_dir / RECORD).read_text())
    assert now["folder"] != before["folder"] and now["model"] == before["model"]
    assert attach(fresh) == []
