"""A file that somebody else has written may be endless: a sentence says so, at once, and nothing of its size is taken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bounded import MOST_BYTES, read_bytes, read_text
from data.shards.store import Manifest
from data.text.chat_templates import read_chat_template
from data.text.templates import Template
from data.tokenizers.published import read_published
from model.formats.adapter_folder import read_info
from model.formats.checksums import damages
from model.formats.headers import TensorHeaders, read_json
from settings.fields import UserError, read_settings_file
from training.checkpoints.pieces import Pieces
from training.checkpoints.runs import read_run
from training.checkpoints.state import read_training_state
from training.report.card import write_card

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs pipes")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def checked(folder: Path) -> None:
    if found := damages(folder):
        raise UserError(*found)


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda folder: read_json(folder / "config.json"),
    "checksums.json": checked,
    "model.safetensors": TensorHeaders,
    "model.safetensors.index.json": TensorHeaders,
    "adapter_config.json": read_info,
    "manifest.json": Manifest.read,
    "chat_template.jinja": read_chat_template,
    "prompt_template.json": Template.read,
    "tokenizer.json": read_published,
    "spiece.model": read_published,
    "vocab.json": read_published,
    "tokenizer_config.json": read_published,
    "state/training.json": read_training_state,
    "state/shards/index.json": lambda folder: Pieces(folder / "state" / "shards"),
    "run.json": lambda folder: None if read_run(folder) is None else folder,
}


@pytest.mark.parametrize("endless", [pipe, device, sparse])
@pytest.mark.parametrize("file", READERS)
def test_what_has_no_end_is_told(tmp_path: Path, file: str, endless: Callable[[Path], None]) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    if file == "vocab.json":
        (tmp_path / "merges.txt").write_text("")
    endless(tmp_path / file)
    if file == "run.json":
        assert READERS[file](tmp_path) is None
        return
    with pytest.raises((UserError, OSError)):
        READERS[file](tmp_path)


@pytest.mark.parametrize("endless", [device, sparse])
def test_settings_may_come_through_a_pipe_and_have_an_end(tmp_path: Path, endless: Callable[[Path], None]) -> None:
    endless(tmp_path / "settings.yaml")
    with pytest.raises(UserError, match="larger than 16 MiB"):
        read_settings_file(tmp_path / "settings.yaml")
    reading, writing = os.pipe()
    os.write(writing, b"seed: 7\n")
    os.close(writing)
    assert read_settings_file(Path(f"/dev/fd/{reading}")) == {"seed": 7}
    os.close(reading)


@pytest.mark.parametrize("read", [read_bytes, read_text])
def test_a_file_of_the_largest_size_is_read(tmp_path: Path, read: Callable[..., object]) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read(tmp_path / "a", 5) in ("12345", b"12345")
    for fails in (partial(read, tmp_path / "a", 4), partial(read, tmp_path), partial(read, tmp_path / "none")):
        with pytest.raises(OSError):
            fails()
    assert MOST_BYTES > 10**6


def test_a_card_is_not_written_through_a_link(tmp_path: Path) -> None:
    """A run's folder may be a stranger's; what it calls README.md may be somewhere else."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    for name in ("README.md", ".tmp-README.md"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    assert write_card(tmp_path / "run", tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists() and "T5" in (tmp_path / "run" / "README.md").read_text()
    shutil.rmtree(tmp_path / "run")


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc")
def test_a_small_file_is_read_where_little_may_be_mapped(tmp_path: Path) -> None:
    """As under `ulimit -v`: what is allowed for such files is no reason to ask for as much."""
    code = (
        "import resource, sys; from bounded import MOST_TABLE_BYTES, read_text\n"
        "mapped = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**26, -1))\n"
        "assert read_text(sys.argv[1], MOST_TABLE_BYTES) == 'small'"
    )
    (tmp_path / "small").write_text("small")
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "small")], cwd=root, check=True)
