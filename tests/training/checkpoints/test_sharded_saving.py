"""A checkpoint of sharded weights is one whole model, and every process finds its rows again."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.optimizers import OPTIMIZERS
from model import hf_format
from model.t5 import T5
from tests.engine.small_models import small_model
from tests.ranks import must_succeed
from training.checkpoints.content import load_optimizer
from training.checkpoints.folder import Checkpoints

CHILD = Path(__file__).with_name("sharded_saving_child.py")


def test_sharded_weights_and_state_are_saved_as_those_of_one_process(tmp_path: Path) -> None:
    must_succeed(CHILD, 2, str(tmp_path / "run"))
    latest, told = Checkpoints(tmp_path / "run", 2).intact()
    assert latest is not None and latest.name == "step_00000001" and not told
    assert [path.name for path in latest.parent.glob("*step_*")] == ["step_00000001"], "nothing half written is left"
    model = hf_format.load(latest)
    expected = T5(small_model("t5").config).initialise(3)
    for (name, weight), reference in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, reference), name
    for name in ("muon", "adafactor"):
        alone = OPTIMIZERS[name](dict(model.named_parameters()))
        written = latest if name == "adafactor" else Checkpoints(tmp_path / name, 2).intact()[0]
        assert written is not None
        load_optimizer(written, alone, torch.device("cpu"))
        assert not alone.incomplete()
    rows = {key: tensor for key, tensor in alone.state.items() if key.endswith("/rows")}
    assert rows and all(len(tensor) == len(dict(model.named_parameters())[key[:-5]]) for key, tensor in rows.items())
