from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from data import durable
from data.cache import make_once
from data.durable import is_full, put_in_place


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the disk, in order: the name of each file and folder that is waited for, and the rename."""
    asked: list[str] = []
    names: dict[int, str] = {}
    real_open, real_sync, real_replace = os.open, os.fsync, os.replace

    def opened(path: Any, *flags: Any) -> int:
        handle = real_open(path, *flags)
        names[handle] = Path(path).name
        return handle

    def synced(handle: int) -> None:
        asked.append(names[handle])
        real_sync(handle)

    def replaced(old: Any, new: Any) -> None:
        asked.append("rename")
        real_replace(old, new)

    for name, instead in (("open", opened), ("fsync", synced), ("replace", replaced)):
        monkeypatch.setattr(durable.os, name, instead)
    return asked


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot open folders")
def test_content_is_on_the_disk_before_its_name_and_the_name_before_we_go_on(tmp_path: Path, order: list[str]) -> None:
    (tmp_path / "fresh").write_text("x")
    put_in_place(tmp_path / "fresh", tmp_path / "final")
    assert order == ["fresh", "rename", tmp_path.name]
    assert (tmp_path / "final").read_text() == "x"


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot open folders")
def test_a_folder_is_made_once_all_below_it_is_on_the_disk(tmp_path: Path, order: list[str]) -> None:
    def fill(folder: Path) -> None:
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "a").write_text("x")
        (folder / "b").write_text("y")

    make_once(tmp_path / "made", fill)
    before, after = order[: order.index("rename")], order[order.index("rename") + 1 :]
    assert set(before) == {"a", "b", "inner", "made.partial"} and after == [tmp_path.name]


@pytest.mark.parametrize(
    "error, full",
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"), True),
        (OSError("4096 requested and 0 written"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (ValueError("No space left"), False),
    ],
)
def test_a_full_disk_is_known_however_it_is_told(error: Exception, full: bool) -> None:
    assert is_full(error) is full
