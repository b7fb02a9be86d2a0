"""Sums of a folder's files: what was changed, cut off or taken away is named; nothing leads out of the folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from model.formats.checksums import CHECKSUMS_FILE, damages, describe, is_inside, read_sums, refuse_damaged, seal
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


def test_whole_folders_have_no_damages(folder: Path) -> None:
    assert damages(folder) == []
    sums = read_sums(folder)
    assert sums is not None and sums["note"] == 1
    assert set(sums["files"]) == {"model.safetensors", "config.json", "state/training.json"}
    content = (folder / "model.safetensors").read_bytes()
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert sums["files"]["model.safetensors"] == describe(folder)["model.safetensors"] == entry
    (folder / "notes.txt").write_text("a file of the user's")
    assert damages(folder) == []


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


def test_folders_of_others_have_no_sums(folder: Path) -> None:
    (folder / CHECKSUMS_FILE).unlink()
    (folder / "config.json").write_text("changed")
    assert damages(folder) == [] and read_sums(folder) is None
    refuse_damaged(folder, "model")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a\\b"])
def test_no_name_leads_out_of_the_folder(folder: Path, name: str) -> None:
    assert not is_inside(name) and is_inside("state/x.json")
    (folder / CHECKSUMS_FILE).write_text(json.dumps({"files": {name: {"bytes": 1, "sha256": ""}}}))
    assert "checksums.json, is damaged" in damages(folder)[0]


@pytest.mark.parametrize("text", ["{", '{"files": {"a": 1}}', "[" * 100_000])
def test_broken_sums_are_damage(folder: Path, text: str) -> None:
    (folder / CHECKSUMS_FILE).write_text(text)
    assert len(damages(folder)) == 1
