"""Who hears of a run in Python: callbacks, columns, a picture, and TensorBoard's event file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from model.formats.checksums import CARD_FILE
from settings.errors import UserError
from tests.training.small_runs import configuration
from trainer_low_mem import LowMemTrainer, plot
from training.report.card import MARK, push_command, write_card
from training.report.endings import Interrupted
from training.report.history import history
from training.report.summary import Summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heard")
    (folder / "text.txt").write_text("".join(f"line {n}: a river runs under bridge {n % 7}\n\n" for n in range(200)))
    (folder / "law.txt").write_text("".join(f"article {n}: boats wait for the morning light\n\n" for n in range(40)))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[Summary, list[dict[str, Any]]]:
    """A run with two validation sets that two listen to: a function, and TensorBoard where it is installed."""
    pytest.importorskip("tensorboard")
    heard: list[dict[str, Any]] = []
    config = configuration(
        folder,
        "heard",
        log_with="tensorboard",
        quiet=True,
        eval_rows=2,
        metrics="f1",
        metric_for_best="law/loss",
        validation_file=f"news={folder / 'text.txt'},law={folder / 'law.txt'}",
    )
    trainer = LowMemTrainer(config, callbacks=[heard.append], metrics={"mine": lambda answers, _: len(answers) + 0.5})
    return trainer.train(), heard


Trained = tuple[Summary, list[dict[str, Any]]]


def test_a_callback_hears_what_the_file_holds(trained: Trained) -> None:
    summary, heard = trained
    lines = Path(summary.metrics_file).read_text(encoding="utf8").splitlines()
    assert heard == [json.loads(line) for line in lines]
    assert {event["event"] for event in heard} >= {"start", "plan", "step", "memory", "eval", "checkpoint", "end"}


def test_columns_of_one_length(trained: Trained) -> None:
    summary, heard = trained
    steps = summary.history()
    assert steps["step"] == [1, 2, 3, 4, 5, 6] and {len(values) for values in steps.values()} == {6}
    assert steps["loss"] == [event["loss"] for event in heard if event["event"] == "step"]
    assert summary.history("eval")["step"] == [0, 3, 6] and summary.history("nothing") == {}
    with pytest.raises(UserError, match="run = no_such_run, has no"):
        history("no_such_run")


def test_each_validation_set_has_its_own_figures(trained: Trained) -> None:
    evaluations = trained[0].history("eval")
    for name in ("loss", "perplexity", "f1", "mine"):
        means = [(a + b) / 2 for a, b in zip(evaluations[f"news/{name}"], evaluations[f"law/{name}"], strict=True)]
        assert name == "perplexity" or evaluations[name] == pytest.approx(means)
    assert evaluations["mine"] == [2.5] * 3 and evaluations["rows"] == evaluations["answered_rows"] == [4] * 3
    best = min(range(3), key=evaluations["law/loss"].__getitem__)
    assert trained[0].best_evaluation and trained[0].best_evaluation["step"] == evaluations["step"][best]


def test_a_run_as_a_picture(trained: Trained) -> None:
    pytest.importorskip("matplotlib")
    figure = plot(trained[0])
    loss, memory, _ = figure.axes
    assert [line.get_label() for line in loss.lines] == ["training", "evaluation"]
    assert [line.get_label() for line in memory.lines] == ["in use", "peak", "budget"]
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")


def test_tensorboard_reads_what_was_written(trained: Trained, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary, _ = trained
    events = EventAccumulator(str(folder / "logs" / "heard" / "frugalt5"))
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [point.step for point in losses] == [1, 2, 3, 4, 5, 6]
    assert [point.value for point in losses] == pytest.approx(summary.history()["loss"])
    assert [point.step for point in events.Scalars("eval/loss")] == [0, 3, 6]
    assert {"memory/peak_bytes", "train/learning_rate"} <= set(events.Tags()["scalars"])


def test_a_callback_ends_a_run(folder: Path) -> None:
    def stops(event: dict[str, Any]) -> str | None:
        return "stop" if event["event"] == "step" and event["step"] == 2 else None

    with pytest.raises(Interrupted, match="stopped after step 2, saved"):
        LowMemTrainer(configuration(folder, "ended"), callbacks=[stops]).train()
    assert (folder / "runs" / "ended" / "checkpoints" / "step_00000002").is_dir()


def test_the_card_of_a_run(trained: Trained) -> None:
    folder = Path(trained[0].model_dir)
    card = (folder / CARD_FILE).read_text(encoding="utf8")
    assert card.startswith("---\nlibrary_name: transformers\n") and f"# {folder.name}" in card
    for part in (
        "- training: text.txt",
        "| planned peak |",
        "| measured peak |",
        "| time |",
        "| loss |",
        "held-out rows",
    ):
        assert part in card
    assert str(folder.parent) not in card, "folders are nobody else's business"
    assert push_command(folder).startswith(f"hf upload YOUR_NAME/heard {folder} . --exclude 'checkpoints/*'")
    (folder / CARD_FILE).write_text(card.replace(MARK, "mine"), encoding="utf8")
    assert not write_card(folder, folder) and "mine" in (folder / CARD_FILE).read_text(encoding="utf8")
