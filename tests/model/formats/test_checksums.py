"""Sums of a folder's files: what was changed, cut off or taken away is named; nothing leads out of the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.formats.checksums import CHECKSUMS_FILE, damages, is_inside, refuse_damaged, seal
from settings.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_folder = tmp_path / "model"
    (model_folder / "state").mkdir(parents=True)
    (model_folder / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
    (model_folder / "config.json").write_text("{}")
    (model_folder / "state" / "training.json").write_text('{"step": 3}')
    seal(model_folder, note=1)
    return model_folder


def test_each_damaged_file_is_named(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").unlink()
    (folder / "state" / "training.json").write_text("{")
    problems = damages(folder)
    assert len(problems) == 3
    for name, words in (("config.json", "missing"), ("model.safetensors", "content"), ("training.json", "1 bytes")):
        assert any(name in damage and words in damage for damage in problems), problems
    assert len(damages(folder, deep=False)) == 2, "a changed bit needs a reading"
    assert len(damages(folder, with_state=False)) == 2
    with pytest.raises(UserError, match=r"--model = .*model\.safetensors is damaged"):
        refuse_damaged(folder, "model")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd"])
def test_no_name_leads_out_of_the_folder(folder: Path, name: str) -> None:
    assert not is_inside(name) and is_inside("state/x.json")
    (folder / CHECKSUMS_FILE).write_text(json.dumps({"files": {name: {"bytes": 1, "sha256": ""}}}))
    assert "checksums.json, is damaged" in damages(folder)[0]
