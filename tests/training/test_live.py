"""How far a run is: what a step, an evaluation and a checkpoint change of it; and a checkpoint refuses what is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from config import load
from memory.choices import step_settings
from settings.errors import UserError
from tests.end_to_end.running import write_text
from trainer_low_mem import LowMemTrainer
from training.evaluation.stopping import BestMetric
from training.live import LiveRun
from training.report.tracking import MetricsFile


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LowMemTrainer]:
    """One that has run two steps, its journal open for as long as a test looks at it."""
    close = MetricsFile.close
    monkeypatch.setattr(MetricsFile, "close", lambda metrics: None)
    write_text(tmp_path / "text.txt")
    flags = {
        "train_file": tmp_path / "text.txt", "output_dir": tmp_path / "runs", "log_dir": tmp_path / "logs",
        "cache_dir": tmp_path / "cache", "run_name": "live", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2,
        "num_layers": 1, "num_decoder_layers": 1, "vocab_size": 512, "max_seq_len": 32, "max_steps": 2, "save_steps": 1,
        "eval_steps": 1, "effective_batch_size": 4, "mixed_precision": "no", "sample_rows": 0, "num_threads": 1,
    }  # fmt: skip
    trainer = LowMemTrainer(load("train", {key: str(value) for key, value in flags.items()}))
    trainer.train()
    yield trainer
    close(trainer.journal.metrics)


def weights(live: LiveRun) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in live.engine.model.parameters()]


def test_the_state_of_a_run(trainer: LowMemTrainer) -> None:
    live = trainer.live
    begun = live.state
    assert begun.step == live.last_good == 2 and begun.tokens > 0 and live.has_saved
    live.applied(3, 100)
    assert (live.state.step, live.state.tokens, live.last_good) == (3, begun.tokens + 100, 2)
    assert live.evaluated(0.5, {"loss": 0.5}) and not live.evaluated(0.75, {"loss": 0.75})
    assert live.state.best_evaluation == {"step": 3, "loss": 0.5}, "of the best"
    assert live.state.best_eval_loss == 0.5 and live.state.first_eval_loss == begun.first_eval_loss
    live.best = BestMetric("bleu", value=30.0)
    live.evaluated(0.25, {"loss": 0.25, "bleu": 20.0})
    assert live.state.best_evaluation == {"step": 3, "loss": 0.25, "bleu": 20.0}, (
        "of the last, as long as step 0 is the best"
    )
    live.evaluated(0.5, {"loss": 0.5, "bleu": 40.0})
    live.evaluated(0.125, {"loss": 0.125, "bleu": 35.0})
    assert live.state.best_evaluation == {"step": 3, "loss": 0.5, "bleu": 40.0} and live.state.best_eval_loss == 0.125
    live.saved()
    assert live.last_good == 3
    kept = live.checkpoint_state()
    assert replace(kept, choice=None, asked=None) == live.state and kept.choice == live.engine.choice.as_dict()
    assert kept.asked == step_settings(live.config)


def test_a_run_goes_back_to_its_checkpoint(trainer: LowMemTrainer) -> None:
    live, before = trainer.live, weights(trainer.live)
    live.applied(3, 100)
    live.divergence.skip(4)
    with torch.no_grad():
        live.engine.model.embedding.zero_()
    live.roll_back("a test")
    assert live.state.step == live.last_good == 2 and live.divergence.skipped == [3], "what was left out stays so"
    assert all(torch.equal(a, b) for a, b in zip(weights(live), before, strict=True))


def test_another_plan_knows_what_a_probe_has_found(trainer: LowMemTrainer) -> None:
    live = trainer.live
    opening: Any = live.keeper._make_plan.__self__  # type: ignore[attr-defined]
    plain = opening.plan_again(live.config, opening.budget)
    probed = replace(opening, spec=replace(opening.spec, machine=replace(opening.spec.machine, correction=1.5)))
    assert probed.plan_again(live.config, opening.budget).peak_bytes > plain.peak_bytes


def test_what_is_published_is_what_is_shown(trainer: LowMemTrainer) -> None:
    live = trainer.live
    best = live.checkpoints.named_best()
    assert best is not None
    live.take_published()
    published, engine = weights(live), live.engine
    live.applied(3, 100)
    with torch.no_grad():
        live.engine.model.embedding.zero_()
    live.take_published()
    assert live.engine is not engine and live.state.step == 3, "the run stays as far as it is"
    assert all(torch.equal(a, b) for a, b in zip(weights(live), published, strict=True))


def test_what_cannot_be_shown_ends_no_run(trainer: LowMemTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(folder: Path) -> None:
        raise UserError("--finetune_from = base, no such folder")

    live = trainer.live
    live.applied(3, 100)
    monkeypatch.setattr(live, "take", gone)
    assert not live.take_published()
    live.close()


def test_a_model_that_is_not_finite_is_not_saved(trainer: LowMemTrainer) -> None:
    live = trainer.live
    live.applied(3, 100)
    with torch.no_grad():
        live.engine.model.encoder.final_norm.weight[0] = float("nan")
    assert not trainer.saver.save(is_best=False)
    assert live.last_good == 2 and not (live.checkpoints.folder / "step_00000003").exists()
    with torch.no_grad():
        live.engine.model.encoder.final_norm.weight[0] = 1.0
    pushed: list[Any] = []
    mirror: Any = type("Mirror", (), {"push": lambda self, *facts: pushed.append(facts)})()
    trainer.saver.mirror = mirror
    assert trainer.saver.save(is_best=False) and live.last_good == 3
    assert pushed == [(live.start.run_dir, live.checkpoints.folder / "step_00000003")]
