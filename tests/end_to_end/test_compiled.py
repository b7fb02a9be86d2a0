"""A whole run whose blocks torch compiles has the losses of one whose blocks run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices.torch_compiler import why_not_for_cpu
from tests.end_to_end.running import Place, write_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # The compiler works on one core.
FLAGS = (
    "--device=cpu",
    "--compiled_kernels=False",
    "--mixed_precision=no",
    "--model_preset=tiny",
    "--max_steps=6",
    "--log_steps=1",
    "--eval_steps=3",
    "--save_steps=3",
    "--effective_batch_size=8",
    "--sample_rows=1",
    "--num_threads=1",
    "--probe=False",
    "--dropout_rate=0",
)


def test_a_run_has_the_losses_of_one_that_compiles_nothing_and_goes_on(tmp_path: Path) -> None:
    if reason := why_not_for_cpu():
        pytest.skip(reason)
    place = Place(tmp_path, tmp_path / "cache")
    text = write_text(tmp_path / "text.txt")
    for name, flag in (("plain", "False"), ("compiled", "True")):
        place.do("train", f"--train_file={text}", f"--run_name={name}", f"--compile={flag}", *FLAGS)
    expected = place.losses("plain")
    losses = place.losses("compiled")
    assert losses.keys() == expected.keys() and max(losses) == 6
    for step, loss in expected.items():
        assert losses[step] == pytest.approx(loss, rel=1e-5), step
    end = {event["event"]: event for event in place.events("compiled")}["end"]
    assert end["measured_peak_bytes"] <= end["planned_peak_bytes"]
    again = place.do(
        "train", "--is_keep_training=True", "--run_name=compiled", "--max_steps=7", "--compiled_kernels=False"
    )
    assert "blocks are compiled by torch" in again.stdout and max(place.losses("compiled")) == 7
