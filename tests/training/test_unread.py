"""What a run was told and nobody has read is said once, before its first step; nothing that has an effect is."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.running import write_text
from tests.training.small_runs import configuration
from trainer_low_mem import LowMemTrainer

NOTE = ", has no effect on this run"


def test_what_nobody_has_read_is_said_once(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    flags = {"max_steps": 1, "allow_download": True, "weight_decay": 0.1, "repetition_penalty": 1.2, "dedup": "exact"}
    LowMemTrainer(configuration(tmp_path, "told", **flags)).train()
    (log,) = (tmp_path / "logs").glob("*.log")
    told = [line for line in log.read_text("utf8").splitlines() if NOTE in line]
    assert [line.split("--")[-1].split(" = ")[0] for line in told] == ["allow_download"]
