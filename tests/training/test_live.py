"""How far a run is: what a step, an evaluation and a checkpoint change of it; and a checkpoint refuses what is not
finite.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.end_to_end.running import write_text
from tests.training.small_runs import configuration
from trainer_low_mem import LowMemTrainer
from training.live import LiveRun
from training.report.log_files import MetricsFile
from training.saving import save


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LowMemTrainer]:
    """One that has run two steps, its log open for as long as a test looks at it."""
    folder = tmp_path_factory.mktemp("live")
    close = MetricsFile.close
    write_text(folder / "text.txt")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_decoder_layers": 1, "max_seq_len": 32}
    trainer = LowMemTrainer(configuration(folder, "live", **sizes, max_steps=2, save_steps=1, eval_steps=1))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MetricsFile, "close", lambda metrics: None)
        trainer.train()
        yield trainer
    assert trainer.log._metrics is not None
    close(trainer.log._metrics)


def weights(live: LiveRun) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in live.engine.model.parameters()]


def test_a_model_that_is_not_finite_is_not_saved(trainer: LowMemTrainer) -> None:
    live, last = trainer.live, trainer.live.last_good
    live.applied(last + 1, 100)
    with torch.no_grad():
        live.engine.model.encoder.final_norm.weight[0] = float("nan")
    folder = live.checkpoints.folder / f"step_{last + 1:08}"
    assert not save(live, is_best=False)
    assert live.last_good == last and not folder.exists()
    with torch.no_grad():
        live.engine.model.encoder.final_norm.weight[0] = 1.0
    assert save(live, is_best=False) and live.last_good == last + 1


def test_rows_that_were_read_ahead_are_those_of_the_next_step(trainer: LowMemTrainer) -> None:
    live = trainer.live
    number = live.state.step + 2
    (plain,) = live.batches(number)
    live.read_ahead()
    (ahead,) = live.batches(number)
    (present,) = live.batches(number - 1)
    assert ahead is live.batches(number)[0], "not read again"
    assert ahead.keys.tolist() == plain.keys.tolist() != present.keys.tolist()
    assert ahead.input_ids.tolist() == plain.input_ids.tolist()


def test_what_is_published_is_what_is_shown(trainer: LowMemTrainer) -> None:
    live = trainer.live
    best = live.checkpoints.named_best()
    assert best is not None
    live.take_published()
    published, engine = weights(live), live.engine
    step = live.state.step + 1
    live.applied(step, 100)
    with torch.no_grad():
        live.engine.model.embedding.zero_()
    live.take_published()
    assert live.engine is not engine and live.state.step == step, "the run stays as far as it is"
    assert all(torch.equal(a, b) for a, b in zip(weights(live), published, strict=True))
