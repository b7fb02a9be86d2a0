"""Files on tmpfs are in memory, those of its folders too; a folder that is not there yet is where it will be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from memory.observe.disks import is_in_memory


def test_the_nearest_mount_above_a_folder_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {"/": "ext4", str(tmp_path): "tmpfs", str(tmp_path / "disk"): "xfs"}
    listed = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: listed)
    assert is_in_memory(tmp_path / "runs" / "later")
    assert not is_in_memory(tmp_path / "disk" / "runs")
    assert not is_in_memory(Path("/"))


def test_where_nobody_says_it_is_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(all: bool) -> None:
        raise PermissionError

    monkeypatch.setattr(psutil, "disk_partitions", refused)
    assert not is_in_memory(tmp_path / "somewhere")
