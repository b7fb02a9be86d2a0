"""`check FOLDER` says whether every file is as it was written, and names each that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.check import check
from commands.merge import open_adapted
from settings.errors import UserError
from settings.loading import load
from tests.training.small_trained import save_trained
from train_low_mem import main
from training.checkpoints.folder import Checkpoints
from training.checkpoints.runs import create_run, publish
from training.saved_model import find_model


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run with two checkpoints."""

    def write(folder: Path) -> None:
        save_trained(folder)
        (folder / "state").mkdir()
        (folder / "state" / "training.json").write_text("{}")

    run_dir = create_run(tmp_path / "runs", "run", "pretrain")
    checkpoints = Checkpoints(run_dir, keep_latest=2)
    for step in (1, 2):
        checkpoint = checkpoints.save(step, write, step == 1)
        publish(checkpoint, run_dir)
    return run_dir


def test_a_whole_run(run_dir: Path) -> None:
    result = dict(check(load("check", {"model": str(run_dir)})))
    assert [Path(folder).name for folder in result] == ["run", "step_00000002", "step_00000001"]
    assert all("files match their checksums" in words for words in result.values())
    assert main(["check", str(run_dir)]) == main(["check", f"--model={run_dir}"]) == 0
    assert main(["check", f"--output_dir={run_dir.parent}"]) == 0, "the newest run"


def test_damaged_files_are_all_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published, older = run_dir / "tokenizer.json", run_dir / "checkpoints" / "step_00000001" / "model.safetensors"
    published.write_bytes(published.read_bytes()[:-1])  # shared with the checkpoint that it came from
    content = older.read_bytes()
    older.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main(["check", str(run_dir)]) == 2
    words = capsys.readouterr().err
    for path in (published, run_dir / "checkpoints" / "step_00000002" / "tokenizer.json", older):
        assert f"{path} is damaged" in words
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        open_adapted(find_model(load("generate", {"model": str(run_dir)})))


def test_folders_without_sums(tmp_path: Path) -> None:
    folder = save_trained(tmp_path / "plain")
    ((_, words),) = check(load("check", {"model": str(folder)}))
    assert words.startswith("no checksums to compare; ") and words.endswith("tensors can be opened")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    assert main(["check", str(folder)]) == 2
    assert main(["check", str(tmp_path / "missing")]) == 2
