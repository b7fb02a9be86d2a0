"""A preference run from its settings to a model that prefers: the parts of the trainer, one after the other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from engine.objectives.preference import METRICS
from engine.optimizers import Step
from engine.step import to_micro_batch
from memory.estimate.workload import ExecutionPlan
from model.lora.adapter import adapters_of
from settings.declared import Config
from settings.loading import load
from tests.training.setups import resolved
from tests.training.small_trained import save_trained
from training.checkpoints.runs import create_run
from training.evaluation.losses import Evaluation, evaluate, mean_metrics
from training.processes.group import Group
from training.setup.build import Engine, build
from training.setup.dpo_reference import attach_reference
from training.setup.resolved import ResolvedRun

CHOICE = ExecutionPlan(4, 2, 1, 1, 3, "float32", "float32", 1 << 20)
ROWS = 8
STEPS = 6


@pytest.fixture
def begin(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Start a run on preferences that say yes rather than no."""
    save_trained(tmp_path / "base")
    path = tmp_path / "preferences.jsonl"
    rows = [{"prompt": f"is it {n}?", "chosen": f"yes {n}", "rejected": "no"} for n in range(80)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**flags: object) -> ResolvedRun:
        settings = {
            "train_file": path,
            "finetune_from": tmp_path / "base",
            "output_dir": tmp_path / "runs",
            "run_name": "run",
            "cache_dir": tmp_path / "cache",
            "max_seq_len": 32,
            "max_steps": STEPS,
            "device": "cpu",
            "beta": 0.5,
            "optimizer": "adamw",
            "learning_rate": 3e-3,
            **flags,
        }
        config: Config = load("dpo", {name: str(value) for name, value in settings.items() if value is not None})
        run = resolved(config, CHOICE, ROWS)
        create_run(config.run.output_dir, config.run.run_name, "dpo", overwrite=True)
        return run

    return make


def train(
    run: ResolvedRun, choice: ExecutionPlan = CHOICE
) -> tuple[Engine, list[float], list[Evaluation], dict[str, float]]:
    """The loop of the trainer: losses of the steps, evaluations before and after, and the metrics of the last step."""
    group = Group()
    attach_reference(run, lambda text: None)
    engine = build(run, choice)
    blockwise = engine.blockwise
    losses: list[float] = []
    metrics: dict[str, float] = {}

    def measure() -> Evaluation:
        return evaluate(blockwise, run.validation.evaluation_batches(64, 3), group, torch.device("cpu"))

    evaluations = [measure()]
    for number in range(STEPS):
        batches = run.loader.micro_batches(number, effective_batch_size=ROWS, batch_size=choice.batch_size_per_gpu)
        count = sum(batch.num_labels for batch in batches)
        blockwise.objective.clear()
        engine.update.begin(Step(number + 1, run.config.train.learning_rate, 0.0, 1))  # type: ignore[arg-type]
        micro_batches = [to_micro_batch(batch, blockwise.model.config, torch.device("cpu")) for batch in batches]
        loss, _ = engine.update.finish(blockwise.gradients(micro_batches, count, engine.update))
        losses.append(loss / count)
        metrics = mean_metrics(blockwise.objective, count, group)
    return engine, losses, [*evaluations, measure()], metrics


@pytest.mark.parametrize("loss", ["sigmoid", "orpo"])
def test_the_model_learns_to_prefer(begin, loss: str) -> None:  # type: ignore[no-untyped-def]
    flags = {"preference_loss": loss, "beta": None if loss == "orpo" else 0.5}
    _, losses, (before, after), metrics = train(begin(**flags))
    assert losses[-1] < losses[0] and after.loss < before.loss
    assert set(metrics) == set(before.metrics) == set(METRICS)
    assert after.metrics["rewards/margins"] > before.metrics["rewards/margins"]
    assert before.tokens == before.rows, "means are over pairs"
    if loss != "orpo":
        assert before.metrics["rewards/accuracies"] == 0.5, "the model begins as its own reference"
    if loss == "sigmoid":
        assert losses[0] == pytest.approx(0.693147, abs=1e-4) and metrics["rewards/accuracies"] > 0.5


def test_adapters_need_no_stored_reference(begin, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    engine, losses, (before, after), _ = train(begin(lora_rank=4, learning_rate=1e-2))
    assert adapters_of(engine.model), "they are on again after the reference was asked"
    assert losses[0] == pytest.approx(0.693147, abs=1e-5) and after.loss < before.loss - 0.01
    assert not list((tmp_path / "cache").glob("reference-*"))
    assert all(weight.requires_grad == ("adapter" in name) for name, weight in engine.model.named_parameters())
    full = begin()  # whose reference is stored: the same log-probabilities as those without adapters
    attach_reference(full, lambda text: None)
    (batch, *_) = full.loader.micro_batches(0, effective_batch_size=ROWS, batch_size=4)
    part = to_micro_batch(batch, engine.model.config, torch.device("cpu"))
    unanswered = dataclasses.replace(part, reference=None)
    (completed,) = engine.blockwise.objective.complete([unanswered], engine.blockwise.token_losses)
    assert part.reference is not None and completed.reference is not None
    assert completed.reference.tolist() == pytest.approx(part.reference.tolist(), rel=1e-5)
