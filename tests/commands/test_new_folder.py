"""What a command may replace by the folder that it writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from commands.convert import convert
from commands.embed import embed
from commands.evaluate import evaluate
from commands.export import export
from commands.generate import generate
from commands.merge import merge
from commands.new_folder import held_output, new_folder
from commands.quantize import quantize
from commands.rerank import rerank
from model import hf_format
from model.formats.checksums import damages
from settings.errors import UserError
from settings.loading import load
from tests.training.setup.test_adapters import make_adapter
from tests.training.small_trained import save_trained
from train_low_mem import main
from training.checkpoints.run_lock import RunLock
from training.checkpoints.runs import create_run


def test_what_is_no_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    with pytest.raises(UserError, match="is a file and can be no new folder"), new_folder("file", True):
        raise AssertionError("begun")
    assert Path("file").read_text() == "mine"


COMMANDS = {
    "generate": generate,
    "embed": embed,
    "rerank": rerank,
    "evaluate": evaluate,
    "merge": merge,
    "convert": convert,
    "quantize": quantize,
    "export": export,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_somebody_writes_is_refused_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the name it is called by, and before the model, which is not there, is looked for; the lock leaves
    nothing.
    """
    monkeypatch.chdir(tmp_path)
    config = load(command, {"model": "none", "output": f"{tmp_path}/a/../out/x.npz"})
    with held_output(Path("out/x.npz")), pytest.raises(UserError, match=r"--output = .*x.npz, is in use"):
        COMMANDS[command](config)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_somebody_trains_is_not_replaced(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path, "r", "pretrain")
    with RunLock() as lock:
        assert lock.acquire(run_dir) == []
        with pytest.raises(UserError, match=r"--output = .*r, is in use"), held_output(run_dir):
            raise AssertionError("begun")
    with held_output(run_dir), RunLock() as lock:
        assert "is in use" in lock.acquire(run_dir)[0]
    make(run_dir, "new")
    assert content(run_dir) == "new"


def make(output: Path, content: str, overwrite: bool = True) -> None:
    with new_folder(str(output), overwrite) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "model").write_text(content)


def content(output: Path) -> str:
    assert damages(output) == []
    return (output / "inner" / "model").read_text()


def test_a_rename_that_fails_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    make(output, "old")
    plain = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(source).name == ".tmp-out":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UserError, match="Input/output error"):
        make(output, "new")
    assert content(output) == "old" and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("convert", "nan"),
        ("merge --adapter=adapter", "nan"),
        ("export --format=gguf", "-inf"),
    ],
)
def test_weights_that_are_not_finite_are_not_published(
    line: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a row of the table that no probe of a few ids reads."""
    monkeypatch.chdir(tmp_path)
    save_trained(Path("base"))
    make_adapter(Path("base"), Path("adapter"), 1)
    model = hf_format.load("base")
    model.embedding.data[-1, -1] = float(value)
    hf_format.save(model, "base")
    assert main([*line.split(), "--model=base", "--output=made"]) == 2
    assert "holds inf or nan in shared.weight; nothing is written" in capsys.readouterr().err
    assert not Path("made").exists()


def test_a_folder_that_holds_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    source = tmp_path / "runs" / "r" / "checkpoints" / "step_00000001"
    source.mkdir(parents=True)
    for output in (source, tmp_path / "runs" / "r", tmp_path / "runs"):
        with pytest.raises(UserError, match="or holds it"), new_folder(str(output), True, source):
            raise AssertionError("begun")
    assert source.is_dir()
