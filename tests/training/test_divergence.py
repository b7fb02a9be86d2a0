"""Numbers that are not finite: what is left out, when a run goes back and slows down, and that nothing broken is
kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.batches.loader import StepLoader
from engine.blockwise import Objective
from settings.declared import Config
from settings.errors import UserError
from tests.end_to_end.running import write_text
from tests.training import small_runs
from tests.training.small_runs import events
from trainer_low_mem import LowMemTrainer
from training.divergence import MOST_IN_A_ROW
from training.recording import Recorder

STEPS = 6
ROWS = 4
NAN = float("nan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder_of_runs = tmp_path_factory.mktemp("divergence")
    write_text(folder_of_runs / "text.txt")
    return folder_of_runs


def configuration(folder: Path, name: str, **flags: object) -> Config:
    rates = {"lr_schedule": "constant", "warmup_steps": 0, "learning_rate": 0.01}
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_decoder_layers": 1,
        "max_seq_len": 32,
        "effective_batch_size": ROWS,
    }
    return small_runs.configuration(folder, name, **{**rates, **sizes, **flags})


def run(folder: Path, name: str, **flags: object) -> tuple[LowMemTrainer, list[float]]:
    trainer = LowMemTrainer(configuration(folder, name, **flags))
    trainer.train()
    steps = events(folder, name, "step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    return trainer, [event["loss"] for event in steps]


def published(folder: Path, name: str) -> Path:
    return folder / "runs" / name / "model.safetensors"


def are_finite(folder: Path, name: str) -> bool:
    files = [published(folder, name), *(folder / "runs" / name / "checkpoints").glob("step_*/model.safetensors")]
    return all(bool(torch.isfinite(weight).all()) for file in files for weight in load_file(file).values())


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Batches, by number, whose loss or whose gradient is nan."""
    plain_batches = StepLoader.micro_batches
    plain_loss = Objective.loss_and_gradients

    def put_in(*batches: int, gradient: bool = False) -> None:
        batch = [0]

        def micro_batches(self, step, **named):
            batch[0] = step
            return plain_batches(self, step, **named)

        def loss_and_gradients(self, *facts):
            loss, grad = plain_loss(self, *facts)
            if batch[0] in batches:
                return (loss, grad * NAN) if gradient else (loss * NAN, grad)
            return loss, grad

        monkeypatch.setattr(StepLoader, "micro_batches", micro_batches)
        monkeypatch.setattr(Objective, "loss_and_gradients", loss_and_gradients)

    return put_in


def reasons(folder: Path, name: str) -> list[tuple[str, int]]:
    """What the run has recovered from, and where it went on."""
    return [(record["reason"], record["step"]) for record in events(folder, name, "recovery")]


def test_a_resumed_run_reads_the_rows_of_one_that_was_never_stopped(folder, poison, monkeypatch):
    poison(1, 3)
    _, whole = run(folder, "whole")
    record = Recorder.step

    def killed(self, *facts):
        if self.live.state.step == 5:
            raise RuntimeError("killed")
        record(self, *facts)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="killed"):
        patched.setattr(Recorder, "step", killed)
        LowMemTrainer(configuration(folder, "cut")).train()
    trainer, losses = run(folder, "cut", is_keep_training=True)
    assert losses == whole, "bit for bit"
    assert trainer.live.divergence.skipped == [1, 3] and events(folder, "cut", "end")[0]["skipped_batches"] == 2
    skipped = [step for reason, step in reasons(folder, "cut") if reason == "not finite"]
    assert skipped == [2, 3]


def test_where_weights_have_taken_what_is_nan_the_run_goes_back_and_past_its_rows(folder, poison):
    poison(4)
    trainer, expected = run(folder, "held", max_grad_norm=1e9, weights_in="file")
    assert reasons(folder, "held") == [("not finite", 5)]
    (record,) = events(folder, "held", "recovery")
    assert record["rows"] == trainer.live.run.loader.rows_of_steps(np.array([4]), ROWS)[0].tolist()
    for gradient in (False, True):
        poison(4, gradient=gradient)
        _, losses = run(folder, f"applied_{gradient}", weights_in="file")
        assert losses == expected, "as if the step had not been tried"
        assert reasons(folder, f"applied_{gradient}") == [("not finite", 5), ("rolled back", 4)]


def test_several_in_a_row_halve_the_learning_rate_from_the_last_checkpoint_on(folder, poison):
    poison(3, 4, 5)
    run(folder, "slower", eval_steps=100, max_grad_norm=1e9)
    rates = [event["learning_rate"] for event in events(folder, "slower", "step")]
    assert rates == [0.01, 0.01, *[0.005] * 4]
    assert reasons(folder, "slower") == [("not finite", 4)] * MOST_IN_A_ROW + [("rolled back", 2)]
    end = events(folder, "slower", "end")[0]
    first = events(folder, "slower", "eval")[0]
    assert end["rate_factor"] == 0.5 and end["first_eval_loss"] == first["loss"] and are_finite(folder, "slower")
    state = json.loads((folder / "runs/slower/checkpoints/latest/state/training.json").read_text("utf8"))
    assert state["divergence"]["halvings"] == 1 and state["divergence"]["skipped"] == [3, 4, 5]


@pytest.mark.slow
def test_a_run_that_diverges_ends_and_publishes_nothing_broken(folder):
    with pytest.raises(
        UserError, match=r"--learning_rate = 1e\+30, the run diverges at step 1: .*0.03125 of it.*no model is published"
    ):
        run(folder, "diverged", learning_rate=1e30, optimizer="adamw", keep_latest_n_ckp=1, save_steps=1)
    assert not published(folder, "diverged").exists()
    assert not list((folder / "runs" / "diverged").rglob("*.safetensors")), "1e30 is finite, and its loss is not"


def test_a_run_that_diverges_late_publishes_its_last_good_checkpoint(folder, poison):
    poison(*range(5, 100))
    with pytest.raises(UserError, match=r"diverges at step 6.*the last good checkpoint is in .*late"):
        run(folder, "late", keep_latest_n_ckp=1, eval_steps=100)
    assert are_finite(folder, "late")
    names = [path.name for path in (folder / "runs" / "late" / "checkpoints").glob("step_*")]
    assert names == ["step_00000004"], "rotation drops no good one for a broken one"
