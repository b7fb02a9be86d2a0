"""What is kept to save time may be damaged: it is made anew, or named; it is never a traceback, and never believed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from settings.errors import UserError
from training.setup.dpo_reference import ReferenceStore


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY\x01\x00v\x00{'descr': (", "other", "half", "longer"])
def test_damaged_log_probabilities_are_named_and_made_anew(tmp_path: Path, damage: bytes | str) -> None:
    store = ReferenceStore(tmp_path / "train.npy", 5)
    store.write(np.array([1]), np.ones((1, 2), np.float32))
    assert store.unknown().tolist() == [True, False, True, True, True]
    assert not ReferenceStore(store.path, 5).was_damaged
    whole = store.path.read_bytes()
    if damage == "other":
        np.save(store.path, np.zeros((5, 3), np.float32))
    else:
        changed = {"half": whole[:-8], "longer": whole + bytes(8)}
        store.path.write_bytes(damage if isinstance(damage, bytes) else changed[damage])
    with pytest.raises(UserError, match=r"train\.npy, is damaged \(.*\); remove it, it is computed anew"):
        store.unknown()
    anew = ReferenceStore(store.path, 5)
    assert anew.was_damaged and anew.unknown().all()
